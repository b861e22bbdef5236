"""Adapters on a draft: switching moves no tensor, rows may differ, folders are peft's own."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.folder import adapters_of
from draftsmith.drafters.model.adapters import RowBackbone, active_adapter, use
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.ensemble import join_adapters
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.trainers.method_config import LoraConfig
from draftsmith.trainers.student.lora import add_adapter, save_adapted, without_adapters
from helpers.models.recording_draft import Watched, teacher_forced
from helpers.runs.damaged_files import KINDS, damage

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3], [8]]
SETTINGS = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "section": "lora"}


def adapted(target: Backbone) -> Backbone:
    """A draft with two shaken adapters, `one` on every layer and `two` on some of them."""
    model = make_drafter(target).module
    use_grouped_attention(model)
    add_adapter(model, "one", layers=[], **SETTINGS)
    add_adapter(model, "two", layers=["q_proj", "down_proj"], **SETTINGS)
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    return Backbone(model.requires_grad_(False).eval(), name="draft")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request: pytest.FixtureRequest) -> tuple[Backbone, Backbone]:
    target = make_target(request.param)
    use_grouped_attention(target.model)
    target.tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    return target, adapted(target)


def test_an_adapter_is_added_by_alpha_over_rank() -> None:
    draft = adapted(make_target("qwen3"))
    layer: Any = draft.model.model.layers[0].mlp.down_proj
    x_XF = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    for name in ("one", "two"):
        use(draft.model, name)
        change_XF = x_XF @ (layer.lora_B[name].weight @ layer.lora_A[name].weight).T
        assert float(change_XF.abs().max()) > 0.01
        torch.testing.assert_close(layer(x_XF), layer.base_layer(x_XF) + 8.0 / 4 * change_XF)


def texts(target: Backbone, drafter: DraftModel, prompts=PROMPTS) -> tuple[list, list]:  # noqa: ANN001
    done = generate(target, drafter, prompts, warper=Warper(1.0), max_new_tokens=14, seed=5)
    return done.tokens, done.origin


def test_bytes_are_those_of_the_adapters_that_are_read(pair: tuple[Backbone, Backbone]) -> None:
    _, draft = pair
    drafter = DraftModel(draft, 64)
    sizes = {}
    for name in (None, "one", "two"):
        drafter.use(name)
        sizes[name] = bytes_of(draft.model)
    base = bytes_of(without_adapters(draft.model))
    assert sizes[None] == base
    assert base < sizes["two"] < sizes["one"]
    both = sizes["one"] + sizes["two"] - base
    assert bytes_of(draft.model, ["one", "two"]) == both
    assert Arm("a", join_adapters(drafter, ["one"])).draft_bytes == sizes["one"]
    assert Arm("a", join_adapters(drafter, ["one", "two"])).draft_bytes == both


def test_switching_is_another_draft_over_the_same_tensors(pair: tuple[Backbone, Backbone]) -> None:
    target, draft = pair
    drafter = DraftModel(draft, target.vocabulary)
    before = {name: (t.data_ptr(), t.clone()) for name, t in draft.model.state_dict().items()}
    assert drafter.adapters == ("one", "two")
    distributions = {}
    ids = torch.tensor([PROMPTS[0]])
    for name in (None, "one", "two", None, "two"):
        drafter.use(name)
        assert drafter.adapter == name
        distributions.setdefault(name, draft.model(ids).logits)
        assert torch.equal(distributions[name], draft.model(ids).logits)
        merged = without_adapters(draft.model, add=name).eval()
        torch.testing.assert_close(merged(ids).logits, distributions[name], atol=2e-5, rtol=1e-4)
    assert not any(torch.equal(distributions[a], distributions[b]) for a, b in [(None, "one"), ("one", "two")])
    after = draft.model.state_dict()
    assert {n: t.data_ptr() for n, t in after.items()} == {n: p for n, (p, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert not any(p.requires_grad for p in draft.model.parameters())


def test_an_unknown_name_lists_those_there_are(pair: tuple[Backbone, Backbone]) -> None:
    target, draft = pair
    with pytest.raises(RequestError, match="no adapter 'law'; it has one, two, and 'base' means"):
        DraftModel(draft, target.vocabulary).use("law")
    with pytest.raises(RequestError, match="no adapter 'law'"):
        RowBackbone(draft, ["one", "law"])
    with pytest.raises(RequestError, match="it has none"):
        make_drafter(target).use("law")


@torch.inference_mode()
def test_training_and_decoding_see_the_same_logits(pair: tuple[Backbone, Backbone]) -> None:
    """Through the lean forward, which runs an adapted layer as a whole."""
    target, draft = pair
    drafter = Watched(draft, target.vocabulary, draft_length=3)
    for name in ("one", "two"):
        drafter.use(name)
        generate(target, drafter, PROMPTS[:3], warper=Warper(1.0), max_new_tokens=12)
        assert draft._is_lean
        for known, proposal in drafter.seen:
            assert proposal.q_BNV is not None
            rows = [a + b for a, b in zip(known, proposal.tokens_BN.tolist(), strict=True)]
            for row, logits in enumerate(teacher_forced(drafter.module, rows)):
                here = logits[len(known[row]) : -1].softmax(-1)
                torch.testing.assert_close(proposal.q_BNV[row, :-1], here, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lean", [True, False])
def test_rows_with_adapters_of_their_own_draft_as_each_alone(lean: bool, pair: tuple[Backbone, Backbone]) -> None:
    target, draft = pair
    names = ["two", None, "one", "two"]
    alone = []
    drafter = DraftModel(draft, target.vocabulary)
    for row, name in enumerate(names):
        drafter.use(name)
        how = {"warper": Warper(1.0), "max_new_tokens": 14, "seed": 5, "requests": [row]}
        done = generate(target, drafter, [PROMPTS[row]], **how)
        alone.append((done.tokens[0], done.origin[0]))
    drafter.use("one")  # what others that share the model draft with is not asked for
    with closing(RowBackbone(draft, names)) as rows:
        rows._is_lean = lean
        together = texts(target, DraftModel(rows, target.vocabulary))
        assert active_adapter(draft.model) == "one"
        distribution = draft.model(torch.tensor([PROMPTS[0]])).logits  # outside of its passes nothing changes
    assert list(zip(*together, strict=True)) == alone
    assert torch.equal(distribution, draft.model(torch.tensor([PROMPTS[0]])).logits)
    assert not any(module._forward_pre_hooks for module in draft.model.modules())


def test_rows_of_adapters_are_not_recorded_and_want_a_name_each(pair: tuple[Backbone, Backbone]) -> None:
    target, draft = pair
    assert DraftModel(draft, target.vocabulary).replayable
    for names in (["one", None, "two"], ["one"] * 5):
        with closing(RowBackbone(draft, names)) as rows:
            drafter = DraftModel(rows, target.vocabulary)
            assert not drafter.replayable
            with pytest.raises(RequestError, match=f"for {len(names)} rows, and the batch has 4"):
                drafter.reset(PROMPTS, 8)


def test_a_hook_in_an_opened_layer_is_no_lean_forward(pair: tuple[Backbone, Backbone]) -> None:
    model = copy.deepcopy(pair[1].model)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not Backbone(model, name="hooked")._is_lean


@pytest.fixture
def folder(pair: tuple[Backbone, Backbone], tmp_path: Path) -> Path:
    target, draft = pair
    save_adapted(draft.model, tmp_path / "drafter", target, LoraConfig(rank=4, name="two"))
    return tmp_path / "drafter"


def test_a_folder_drafts_as_what_was_saved(pair: tuple[Backbone, Backbone], folder: Path) -> None:
    """By default with the adapter that the run trained; `base` and other names on request."""
    target, draft = pair
    drafter = DraftModel(draft, target.vocabulary)
    for asked, name in ((None, "two"), ("one", "one"), ("base", None)):
        drafter.use(name)
        loaded = load_drafter(folder, target, config=DrafterConfig(adapter=asked))
        assert loaded.adapter == name
        assert texts(target, loaded) == texts(target, drafter)
    with pytest.raises(RequestError, match="no adapter 'law'; it has one, two"):
        load_drafter(folder, target, config=DrafterConfig(adapter="law"))


def test_the_folder_is_peft_s_own(pair: tuple[Backbone, Backbone], folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, draft = pair
    ids = torch.tensor([PROMPTS[0]])
    drafter = DraftModel(draft, 61)
    base = AutoModelForCausalLM.from_pretrained(folder)
    for name in (None, "one", "two"):
        drafter.use(name)
        model = copy.deepcopy(base)
        if name is not None:
            model = PeftModel.from_pretrained(model, folder / "adapters" / name)
        torch.testing.assert_close(model(ids).logits, draft.model(ids).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["0", "1", "mlp", "layers", "self_attn", "weight", "lora_A"])
def test_an_adapter_may_be_called_as_a_part_of_the_model(
    name: str, pair: tuple[Backbone, Backbone], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    target, draft = pair
    model = without_adapters(draft.model).eval()
    add_adapter(model, name, layers=[], **SETTINGS)
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if "lora_B" in own:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    save_adapted(model, tmp_path, target, LoraConfig(rank=4, name=name))
    ids = torch.tensor([PROMPTS[0]])
    distribution, loaded = model(ids).logits, load_drafter(tmp_path, target)
    assert loaded.adapter == name
    torch.testing.assert_close(loaded.module(ids).logits, distribution)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.allclose(base(ids).logits, distribution, atol=0.1)
    peft_s = PeftModel.from_pretrained(base, tmp_path / "adapters" / name)
    torch.testing.assert_close(peft_s(ids).logits, distribution, atol=1e-5, rtol=1e-4)


BAD_SETTINGS: dict[str, dict[str, Any]] = {
    "no rank": {"r": None},
    "rank 0": {"r": 0},
    "a word": {"lora_alpha": "x"},
    "other layers": {"target_modules": ["nowhere"]},
    "no layers": {"target_modules": 3},
}


def damaged(how: str, place: Path) -> None:
    if how == "missing":
        shutil.rmtree(place)
    elif how == "weights":
        (place / "adapter_model.safetensors").unlink()
    elif how == "other rank":
        path = place / "adapter_config.json"
        path.write_text(path.read_text().replace('"r": 4', '"r": 2'))
    elif how in KINDS:
        damage(place / "adapter_model.safetensors", how)
    elif how in BAD_SETTINGS:
        path = place / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | BAD_SETTINGS[how]))
    elif how == "no json":
        (place / "adapter_config.json").write_text("{")
    else:
        path = place / "adapter_config.json"
        path.write_text(path.read_text().replace('"use_dora": false', '"use_dora": true'))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", r"adapter_config\.json is missing"),
        ("weights", "cannot be read"),
        *((kind, r"adapter_model\.safetensors .* cannot be read.*copy") for kind in KINDS),
        *((how, "does not hold the sizes of an adapter") for how in BAD_SETTINGS),
        ("other rank", "does not fit the model beside it"),
        ("no json", "is no adapter of peft"),
        ("dora", "is no plain LoRA adapter"),
    ],
)
def test_a_damaged_adapter_is_refused(how: str, says: str, pair: tuple[Backbone, Backbone], folder: Path) -> None:
    damaged(how, folder / "adapters" / "one")
    with pytest.raises(RequestError, match=says):
        load_drafter(folder, pair[0])


@pytest.mark.parametrize("listed", ["one", [1], {"one": 1}, None])
def test_a_list_of_adapters_that_is_none(listed: Any, pair: tuple[Backbone, Backbone], folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["draftsmith"]["settings"]["adapters"] = listed
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"config\.json says that its adapters are"):
        load_drafter(folder, pair[0])
    with pytest.raises(RequestError, match=r"config\.json says that its adapters are"):
        adapters_of(folder)


def test_an_adapted_draft_is_lossless(pair: tuple[Backbone, Backbone], folder: Path) -> None:
    config = AuditConfig(tokens=500, sequences=20_000, temperature=1.0, batch=4, prompts=4, max_new_tokens=40)
    report = audit(pair[0], load_drafter(folder, pair[0]), PROMPTS, config)
    assert report.verdict == "lossless", report.text()
