"""The audit passes what is right and catches every planted bug."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.decoding.sampling import Warper
from draftsmith.errors import RequestError
from draftsmith.eval.audit.audit import FALSE_ALARM, audit, failures_of
from draftsmith.eval.audit.enumeration import enumerate_decoding
from draftsmith.eval.audit.plants import PLANTS
from draftsmith.eval.audit.replay import replay
from draftsmith.eval.audit.rosenblatt import judge, transform
from draftsmith.eval.audit.scores import detectable_total_variation
from draftsmith.eval.audit.toys import TOYS, Toy
from draftsmith.eval.config import AuditConfig
from scipy import stats

LEVEL = FALSE_ALARM / 4
PROMPTS = [[n, n + 1, 2 * n % 61] for n in range(1, 40)]
SMALL = AuditConfig(tokens=6000, sequences=200_000, max_new_tokens=60, prompts=4, batch=50)


def test_defaults_see_what_the_documentation_promises() -> None:
    config = AuditConfig()
    assert detectable_total_variation(81, config.sequences, LEVEL) <= 0.005
    assert detectable_total_variation(20, config.tokens, LEVEL) <= 0.02


ASK_THE_HOST = ("rest", "function", "intersection", "intersection argmax", "retokenised")
SEARCH_TREES = "suffix"  # on the host too, token by token; every day the two rules of the hybrid
EVERY_DAY = ("suffix-hybrid", "suffix-hybrid static")
AS_DFLASH = ("peagle argmax", "peagle tempered")  # drawn by the same function, which DFlash's try every day
AS_EAGLE = [name for name in TOYS if name.startswith("mtp") and name != "mtp chain"]  # by EAGLE's own proposer
SELDOM = [*AS_DFLASH, *AS_EAGLE, *(name for name in TOYS if name.startswith(SEARCH_TREES) and name not in EVERY_DAY)]
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in TOYS]
# the filter by count says the most of a method: q and p lack different tokens; at T = 0 greedy rules have tests of their own
WARPERS = [
    pytest.param(Warper(0.0), marks=pytest.mark.slow),
    pytest.param(Warper(0.7), marks=pytest.mark.slow),
    Warper(1.0, top_k=2),
    pytest.param(Warper(0.6, top_p=0.8), marks=pytest.mark.slow),
]


def sequences_of(name: str) -> int:
    if name.startswith(SEARCH_TREES):
        return 2_000
    return 4_000 if name in ASK_THE_HOST else 20_000


@pytest.mark.one_in(3)
@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_method_passes_enumeration(name: str, warper: Warper) -> None:
    small = Toy.of(name, seed=1)
    found = enumerate_decoding(
        small.target,
        small.proposer,
        rule=None,
        warper=warper,
        seed=2,
        level=LEVEL,
        sequences=sequences_of(name),
        length=small.kind.length,
        prompt=small.kind.prompt,
    )
    assert found.p_value > LEVEL


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLANTS)
def test_enumeration_alone_catches_every_plant(name: str) -> None:
    plant, small = PLANTS[name], Toy.of("draft-model", seed=1)
    found = enumerate_decoding(
        small.target,
        lambda: plant.toy(small.drafts),
        rule=plant.make_rule(),
        sequences=100_000,
        warper=Warper(0.7),
        seed=1,
        level=LEVEL,
    )
    assert found.p_value < 1e-12


@pytest.mark.parametrize(
    "rule",
    ["lossy-typical", *(pytest.param(each, marks=pytest.mark.slow) for each in ("lossy-lenient", "lossy-topk-match"))],
)
def test_a_lossy_rule_gets_its_distance_in_place_of_a_verdict(pair, rule: str) -> None:
    report = audit(*pair, PROMPTS, SMALL, rule=rule)
    assert report.verdict == "lossy"
    assert report.distance > 0.03
    assert f"({rule}, distance 0." in report.text()
    assert report.failures == []


def test_the_stated_power_is_real() -> None:
    """A distribution exactly `detectable` away is caught at least 99 times in 100."""
    cells, samples = 20, 40_000
    shift = detectable_total_variation(cells, samples, LEVEL)
    distribution = np.full(cells, 1 / cells)
    distribution[: cells // 2] *= 1 + 2 * shift
    distribution[cells // 2 :] *= 1 - 2 * shift
    rng = np.random.default_rng(0)
    caught = [stats.chisquare(rng.multinomial(samples, distribution)).pvalue < LEVEL for _ in range(1000)]
    assert np.mean(caught) >= 0.98
    honest = [stats.chisquare(rng.multinomial(samples, np.full(cells, 1 / cells))).pvalue < LEVEL for _ in range(1000)]
    assert np.mean(honest) < 0.01


def test_transforms_are_uniform_under_the_distribution_and_not_under_another() -> None:
    g = torch.Generator().manual_seed(0)
    rows, V = 30_000, 50
    p = (1.5 * torch.randn(rows, V, generator=g)).softmax(-1)
    q = (p.log() + torch.randn(rows, V, generator=g)).softmax(-1)
    w = torch.rand(rows, generator=g, dtype=torch.float64)

    def tested(distribution: torch.Tensor) -> float:
        emitted = torch.multinomial(distribution, 1, generator=g)[:, 0]
        return judge([transform(p, q, emitted, w).numpy()], LEVEL).histogram_p

    assert tested(p) > 1e-4
    # a lean of 3 % is a total variation of 0.01, below what 30,000 tokens have to see
    assert tested(0.9 * p + 0.1 * q) < 1e-6
    assert tested(0.8 * p + 0.2 * q) < 1e-12


def test_four_small_p_values_are_no_failure_where_one_would_be() -> None:
    """Each test is held to its share of the error rate, not to the whole (Holm 1979)."""
    judged = SimpleNamespace(histogram_p=5e-4, mean_p=0.5, serial_p=0.4)
    greedy = SimpleNamespace(bugs=0, near_tie_p=1.0)
    assert failures_of(SimpleNamespace(p_value=0.3), judged, greedy) == []
    judged.histogram_p = 2e-4
    assert failures_of(SimpleNamespace(p_value=0.3), judged, greedy) == ["histogram of the real pair, p = 0.0002"]


def test_serial_dependence_is_seen_where_the_histogram_is_flat() -> None:
    rng = np.random.default_rng(1)
    free = [rng.random(60) for _ in range(300)]
    assert judge(free, LEVEL).serial_p > 1e-4
    # every sequence keeps to one half of the interval, all together they are uniform
    bound = [(u + (i % 2)) / 2 for i, u in enumerate(free)]
    found = judge(bound, LEVEL)
    assert found.histogram_p > 1e-4
    assert found.serial_p < 1e-12


@pytest.fixture(scope="module")
def pair():
    target = make_target("qwen3")
    return target, make_drafter(target, noise=0.03)


def test_a_right_decoder_is_called_lossless(pair) -> None:
    report = audit(*pair, PROMPTS, SMALL)
    assert report.verdict == "lossless", report.text()
    assert "would see a bias" in report.text()
    assert "a bias along p - q of" in report.text()
    assert report.to_dict()["rosenblatt"]["tokens"] >= 6000
    assert report.to_dict()["scores"]["tokens"] == report.rosenblatt.tokens
    assert len(report.scores.tests) > 12


# that enumeration alone catches each is tested above; here one bug of a draft and one of a tree
FEW = {"argmax-draft", "sorted-siblings"}


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in PLANTS])
def test_the_whole_audit_fails_with_a_plant(pair, name: str) -> None:
    report = audit(*pair, PROMPTS, SMALL, plant=name)
    assert report.verdict == "NOT lossless"


ALONE = ["argmax-draft", "fresh-draw", "residual-argmax", "typical-acceptance"]


@pytest.mark.parametrize(
    "name", [ALONE[1], *(pytest.param(n, marks=pytest.mark.slow) for n in ALONE if n != ALONE[1])]
)
def test_the_real_pair_alone_sees_a_biased_rule(pair, name: str) -> None:
    report = audit(*pair, PROMPTS, SMALL, plant=name)
    assert failures_of(None, report.rosenblatt, report.replay)


def test_transformers_own_decoding_can_be_audited(pair) -> None:
    config = AuditConfig(tokens=600, max_new_tokens=40, prompts=2, batch=4)
    report = audit(*pair, PROMPTS, config, decoder="hf")
    assert report.verdict == "lossless", report.text()
    assert report.enumeration is None


def test_a_wrong_greedy_token_is_a_bug_and_is_named(pair) -> None:
    target, _ = pair
    right = target.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, 3:
    ].tolist()
    assert replay(target, [[1, 2, 3]], [right]).bugs == 0
    wrong = [*right[:5], (right[5] + 1) % 61, *right[6:]]
    found = replay(target, [[1, 2, 3]], [wrong])
    assert found.bugs >= 1
    assert "token 5" in found.first_bug


def test_an_unknown_bug_is_refused(pair) -> None:
    with pytest.raises(RequestError, match="known: argmax-draft"):
        audit(*pair, PROMPTS, SMALL, plant="nonsense")
