"""`inspect-drafter` on drafters that have learnt to draft, published with words that are left out or say otherwise.

Each is trained by its own objective on what a target writes behind some prompts, so that what it reads matters; then
it is written in a published form, and a word of that is taken away or made wrong. What acceptance supports has to be
the way in which it was trained. Read next: `launch/measure/readings.py`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.prompts import load_prompts, render
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.dspark import DSparkNet
from draftsmith.drafters.block.net import BlockNet
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.export import ServedTarget, export_of
from draftsmith.drafters.folder import save_heads
from draftsmith.drafters.mtp.layers import MtpShape
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.method_config import BlockConfig, Eagle3Config, MtpConfig
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.teacher.frozen import settings_of
from helpers.models.method_objectives import OBJECTIVES, nothing
from helpers.models.published_forms import QWEN
from safetensors.torch import save_file
from torch import Tensor, nn

VOCABULARY, HIDDEN, LONGEST, THETA = 300, 32, 24, 30.0
Tensors = dict[str, Tensor]
Words = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A target, and what it writes behind the prompts of a file."""

    target: Backbone
    prompts: Path
    batch: dict[str, Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target of large random weights: what it writes depends on all of the text."""
    place = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    sizes = ModelConfig(architecture="qwen3", layers=5, hidden=HIDDEN, heads=4, kv_heads=2, head_size=8)
    model = fresh_model(sizes, vocabulary=VOCABULARY, eos=None).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.mul_(1 if parameter.ndim < 2 or "embed" in name else 12)
    model.lm_head.weight = nn.Parameter(0.3 * torch.randn(VOCABULARY, HIDDEN), requires_grad=False)
    model.model.norm.weight.uniform_(0.3, 3)
    model.config.tie_word_embeddings = False
    model.config.rope_parameters["rope_theta"] = THETA
    model.save_pretrained(place / "target")
    tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, VOCABULARY)
    tokenizer.save_pretrained(place / "target")
    target = Backbone(type(model).from_pretrained(place / "target").eval(), name=str(place / "target"))
    target.tokenizer = tokenizer
    prompts = place / "prompts.jsonl"
    texts = [f"{a}{b} {c}" for a, b, c in zip("abcdefgh", "xyzuvwst", "01234567", strict=True)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    tokens = [render(each, tokenizer, limit=64) for each in load_prompts(str(prompts), limit=len(texts))]
    answers = autoregressive(target, tokens, warper=Warper(0.0), max_new_tokens=LONGEST, eos_ids=[]).tokens
    rows = [begun + answer for begun, answer in zip(tokens, answers, strict=True)]
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    at = torch.arange(ids.shape[1]).expand_as(ids)
    ends = torch.tensor([[len(begun), len(row)] for begun, row in zip(tokens, rows, strict=True)])
    counts = (at >= ends[:, :1]) & (at < ends[:, 1:])
    batch = {"input_ids": ids, "loss_mask": counts, "positions": at, "documents": torch.zeros_like(ids)}
    return Pair(target, prompts, batch)


def trained(pair: Pair, method: str, net: Any, steps: int, **sections: Any) -> Any:
    """The network, behind some steps of its own objective."""
    goal = OBJECTIVES[method](Recipe(method=method, **sections), net, pair.target.model, nothing)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        loss, _ = goal.module(pair.batch, goal.prepare(pair.batch))
        optimizer.zero_grad()
        (loss / pair.batch["loss_mask"].sum()).backward()
        optimizer.step()
    return net.eval().requires_grad_(False)


def eagle3(pair: Pair, steps: int, **chosen: Any) -> Eagle3Net:
    ids = range(chosen.pop("tokens", VOCABULARY))
    net = Eagle3Net.for_target(pair.target.model, ids=ids, **({"layers": (1, 3)} | chosen))
    return trained(pair, "eagle3", net, steps, eagle3=Eagle3Config(vocabulary=len(ids), passes=3))


def dflash(pair: Pair, steps: int, **chosen: Any) -> BlockNet:
    sizes = {"layers": (1, 3), "decoder_layers": 1, "size": 4, "layout": "fill-in", "causal": False}
    net = BlockNet.for_target(pair.target.model, **(sizes | chosen))
    return trained(pair, "dflash", net, steps, block=BlockConfig(size=4, decoder_layers=1, anchors=16))


def dspark(pair: Pair, steps: int, **chosen: Any) -> DSparkNet:
    sizes = {"layers": (1, 3), "decoder_layers": 1, "size": 4, "layout": "anchor-first", "causal": False}
    net = DSparkNet.for_target(pair.target.model, **(sizes | {"vocabulary": VOCABULARY, "rank": 6} | chosen))
    block = BlockConfig(size=4, decoder_layers=1, anchors=16, layout=chosen.get("layout"))
    return trained(pair, "dspark", net, steps, block=block)


def mtp(pair: Pair, steps: int, **chosen: Any) -> MtpNet:
    net = MtpNet(MtpShape.of(pair.target.model.config, **chosen))
    return trained(pair, "mtp", net, steps, mtp=MtpConfig(passes=3, state=net.config.state))


def in_form(pair: Pair, net: Any, form: str, place: Path) -> tuple[Words, Tensors]:
    """Config and tensors of a drafter as an export has them."""
    settings, model = settings_of(net.config), pair.target.model
    save_heads(net, place, pair.target, family=net.family, settings=settings)
    made = export_of(
        place,
        net.family,
        json.loads(json.dumps(settings)),
        ServedTarget.of("org/target", model.config, model),
        form,
        dtype="fp32",
        head_VH=model.get_output_embeddings().weight,
        table=lambda: model.get_input_embeddings().weight,
    )
    return json.loads(json.dumps(made.config)), dict(made.tensors)


def in_speculators_words(net: MtpNet) -> tuple[Words, Tensors]:
    """An MTP module as speculators has it."""
    there = {
        "fc": "input_proj",
        "pre_fc_norm_embedding": "token_layernorm",
        "pre_fc_norm_hidden": "hidden_layernorm",
        "norm": "final_layernorm",
    }
    names = {name: name.removeprefix("layers.0.") for name in net.state_dict()}
    names |= {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in there.items()}
    layer = QWEN | {"intermediate_size": net.config.intermediate, "rope_theta": THETA}
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
    return config, {f"mtp_layers.0.{names[name]}": tensor for name, tensor in net.state_dict().items()}


def one_later(config: Words, _tensors: Tensors) -> None:
    """Numbers of states where a reader expects those of the layers behind which they stand."""
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")}


def without(*names: str) -> Callable[[Words, Tensors], None]:
    """A config that does not say so."""

    def change(config: Words, _tensors: Tensors) -> None:
        for table in (config, config.get("dflash_config", {}), config.get("transformer_layer_config", {})):
            for name in names:
                table.pop(name, None)

    return change


def ids_for_offsets(_config: Words, tensors: Tensors) -> None:
    """A map that lists the tokens, which are so low that offsets would be tokens too."""
    tensors["d2t"] = tensors.pop("t2d").nonzero()[:, 0]


@dataclass(frozen=True)
class Planted:
    """How a drafter was trained, how it is published, and what acceptance has to say."""

    make: Callable[..., Any]
    steps: int
    form: str
    plant: Callable[[Words, Tensors], None]
    supports: str
    """What the verdict says behind `acceptance supports `."""
    chosen: Words = field(default_factory=dict)


ANOTHER = "another reading: "
PLANTED = {
    "states one too late": Planted(eagle3, 40, "vllm", one_later, rf"{ANOTHER}hidden states 1, 3 \("),
    "nothing": Planted(eagle3, 60, "vllm", without(), "the drafter as it is read here"),
    "nothing was trained": Planted(eagle3, 0, "vllm", without(), "no reading"),
    "a flag is left out": Planted(
        eagle3,
        80,
        "speculators",
        without("norm_before_residual"),
        f"{ANOTHER}norm_before_residual true",
        {"norm_before_residual": True},
    ),
    "a norm is not spoken of": Planted(
        eagle3, 80, "speculators", without("norm_output"), f"{ANOTHER}output_norm true", {"output_norm": True}
    ),
    "no angle is said": Planted(
        eagle3, 80, "vllm", without("rope_theta", "rope_parameters"), f"{ANOTHER}rope_theta 30"
    ),
    "ids in place of offsets": Planted(eagle3, 80, "vllm", ids_for_offsets, f"{ANOTHER}d2t as ids", {"tokens": 150}),
    "slots see earlier ones alone": Planted(
        dflash, 160, "vllm", without("causal"), f"{ANOTHER}causal true", {"causal": True}
    ),
    "a shift by one": Planted(
        dspark, 80, "vllm", without("sample_from_anchor"), f"{ANOTHER}layout fill-in", {"layout": "fill-in"}
    ),
    "states in front of the norm": Planted(mtp, 80, "", without(), f"{ANOTHER}state before", {"state": "before"}),
    "the first embedding": Planted(mtp, 80, "", without(), f"{ANOTHER}blank_first true", {"blank_first": True}),
}


FAST = "states one too late"


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what == FAST else pytest.mark.slow) for what in PLANTED]
)
def test_acceptance_supports_what_was_trained(
    what: str, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = PLANTED[what]
    torch.manual_seed(1)
    net = case.make(pair, case.steps, **case.chosen)
    config, tensors = in_form(pair, net, case.form, tmp_path / "own") if case.form else in_speculators_words(net)
    case.plant(config, tensors)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    asked = ["--target", pair.target.name, "--prompts", str(pair.prompts), "--max-new-tokens", str(LONGEST)]
    assert main(["inspect-drafter", str(folder), *asked]) == 0
    said = capsys.readouterr().out
    assert re.search(f"acceptance supports {case.supports}", said), said
    if ANOTHER in said:
        reading = shlex.split(said[said.index("--reading") :])[1]
        flags = ["--target", pair.target.name, "--out", str(tmp_path / "ours"), "--reading", reading]
        assert main(["convert-drafter", str(folder), *flags]) == 0
        again = load_drafter(tmp_path / "ours", pair.target).module
        assert again.config == net.config
        assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in again.state_dict().items())
