"""Models whose logits are more than a product: known part by part, or refused before anything is learnt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.benchmarks.common.random_models import GROUPED, SIZES
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters import projection
from draftsmith.drafters.eagle.family import load_eagle
from draftsmith.drafters.folder import save_heads
from draftsmith.drafters.heads.bpd import load_bpd
from draftsmith.drafters.heads.hydra import load_hydra
from draftsmith.drafters.heads.medusa import load_medusa
from draftsmith.drafters.projection import Projection, Shaping, check_logits
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.model import Recipe
from draftsmith.launch.train import train
from draftsmith.trainers import target
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.method_config import BpdConfig, Eagle3Config, MedusaConfig, TuneConfig
from draftsmith.trainers.methods import METHODS
from draftsmith.trainers.teacher.tuned import TunedTarget
from helpers.models.method_objectives import build
from helpers.models.random_models import random_model as of_family
from helpers.models.small_drafters import make_on_target
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

LAYERS = GROUPED | {"num_hidden_layers": 3}
OF_THREE = SIZES | {"vocab_size": VOCABULARY} | LAYERS
FULL = {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 16, "sliding_window": 64}
GPT = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64}
SHAPED: dict[str, dict[str, Any]] = {
    "gemma2": FULL | {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 8.0},
    "hyperclovax": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "minicpm3": {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "q_lora_rank": 16}
    | {"kv_lora_rank": 16, "v_head_dim": 8, "dim_model_base": 8},
    "phi": {"num_key_value_heads": 4},
}
PLAIN = {
    "llama": {},
    "qwen3": {},
    "gpt2": GPT,
    "mistral": {},
    "gemma3_text": FULL,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "gpt_neox": {},
    "qwen3_moe": {},
    "gemma2": FULL | {"final_logit_softcapping": None},
    "granite": {"logits_scaling": 1.0},
    "cohere": {"logit_scale": 1.0},
}
TEXT = ["abc def ghi jkl mno pqr\n"] * 5


def random_model(family: str, **settings: Any) -> PreTrainedModel:
    """With the decoder's attention, as `load_target` would give it."""
    model = of_family(family, spread=1.0, **LAYERS | settings)
    use_grouped_attention(model)
    return model


@lru_cache
def shaped(family: str) -> PreTrainedModel:
    """A model with more than a product, its bias drawn too."""
    model = random_model(family, **SHAPED[family])
    bias = model.get_output_embeddings().bias
    if bias is not None:
        bias.normal_(0, 1)
    return model


def nothing(_module: nn.Module, _folder: Path) -> None:
    """Where an export goes that no test looks at."""


def tuned(model: PreTrainedModel) -> TunedTarget:
    return TunedTarget(Backbone(copy.deepcopy(model), name="own"), TuneConfig(rank=2), row_tokens=64)


class Words:
    """A tokenizer as far as a fresh draft asks."""

    eos_token_id = None


SMALL = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=64)
TERMS = ObjectiveConfig(kl=1, ce=1)
HEADS = MedusaConfig(heads=2)
IDS = range(VOCABULARY)
GOALS: dict[str, Callable[[Any], object]] = {
    "distill": lambda model: build("distill", model, tokenizer=Words(), model=SMALL, objective=TERMS),
    "medusa": lambda model: build("medusa", model, medusa=HEADS, objective=TERMS),
    "medusa2": lambda model: build("medusa2", tuned(model), medusa=HEADS, objective=TERMS),
    "hydra": lambda model: build("hydra", model, medusa=HEADS, objective=TERMS),
    "bpd": lambda model: build("bpd", model, bpd=BpdConfig(block=3), objective=TERMS),
    "bpd tuned": lambda model: build("bpd", tuned(model), bpd=BpdConfig(block=3), objective=TERMS),
    "eagle": lambda model: build("eagle", model, objective=TERMS),
    "eagle3": lambda model: build("eagle3", model, ids=IDS, eagle3=Eagle3Config(layers=(0, 1, 2)), objective=TERMS),
}


@pytest.mark.parametrize("method", GOALS)
@pytest.mark.parametrize("family", ["llama", *SHAPED])
def test_every_method_takes_the_target(family: str, method: str) -> None:
    GOALS[method](shaped(family) if family in SHAPED else random_model(family))


# ---- what the record says, beside the model's own forward pass -----------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", SHAPED)
def test_the_record_is_the_model_s_own_way(family: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(shaped(family)).to(dtype)
    check_logits(model)
    ids = torch.tensor([[3, 9, 27, 20]])
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state
        found, wanted = Projection.of(model).logits(hidden), model(ids).logits.float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(4 * torch.finfo(dtype).eps * wanted.abs().max()))


@pytest.mark.parametrize("family", SHAPED)
def test_a_part_that_is_left_out_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the precisions that targets have, whichever part it is."""
    for part in ("_FACTORS", "_DIVISORS", "_CAPS", "_MULTIPLIES"):
        monkeypatch.setattr(projection, part, ())
    for dtype in (torch.float32, torch.bfloat16):
        left_out = copy.deepcopy(shaped(family)).to(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(projection, "getattr", without_bias, raising=False)
            with pytest.raises(RequestError, match="on a row of 8 tokens they differ"):
                check_logits(left_out)


def without_bias(thing: Any, name: str, default: Any) -> Any:
    """`getattr` that sees no bias."""
    return None if name == "bias" else getattr(thing, name, default)


def test_a_cap_does_not_hide_what_stands_in_front_of_it() -> None:
    """Logits of hundreds are all at the cap, whatever they were multiplied by."""
    model = copy.deepcopy(shaped("gemma2"))
    model.lm_head.weight.mul_(20)
    check_logits(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection.Shaping, "of", lambda _model: Shaping(1.2, 30.0))
        with pytest.raises(RequestError, match="on a row of 8 tokens they differ"):
            check_logits(model)


class Shifted:
    """Says one token less often than its projection does."""

    def forward(self, **given: Any) -> Any:
        found = super().forward(**given)
        found.logits[..., 7] -= 1
        return found


def test_a_class_that_nobody_knows_is_seen() -> None:
    model = random_model("llama")
    check_logits(model)
    model.__class__ = type("Shifted", (Shifted, LlamaForCausalLM), {})
    with pytest.raises(RequestError, match=r"model.start_from 'mine' \(Shifted\) changes its"):
        check_logits(model, "model.start_from 'mine'")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", PLAIN)
def test_a_projection_alone_is_taken(family: str, dtype: torch.dtype) -> None:
    """And nothing is left behind: neither a hook, nor a draw from the random numbers."""
    model = random_model(family, **PLAIN[family]).to(dtype)
    before = torch.get_rng_state()
    check_logits(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_that_are_only_shapes_are_not_run() -> None:
    for family in ("llama", "gemma2", "phi"):
        with torch.device("meta"):
            config = AutoConfig.for_model(family, **OF_THREE | SHAPED.get(family, {}))
            check_logits(AutoModelForCausalLM.from_config(config))


# ---- where models come in ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with scaled logits and its tokenizer."""
    place = tmp_path_factory.mktemp("cohere")
    tokenizer = train_tokenizer(TEXT, 300)
    model = random_model("cohere", logit_scale=0.25, vocab_size=300)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


RUNS = [
    "distill",
    "boost",
    "medusa",
    "medusa2",
    "hydra",
    "bpd",
    "bpd-tuned",
    "eagle",
    "eagle3",
    "dflash",
    "dspark",
    "dflash2",
    "peagle",
    "pard",
    "mtp",
]


def test_every_method_with_a_target_is_here() -> None:
    assert {recipe.removesuffix("-tuned") for recipe in RUNS} == {
        name for name, method in METHODS.items() if method.has_target
    }


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_ends_before_its_rows_are_made(
    recipe: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither data nor the target's continuations, which take longest, are looked at."""
    monkeypatch.setattr(projection, "_FACTORS", ())
    with pytest.raises(RequestError, match=f"target.path '{folder}' .*changes its logits behind"):
        train(f"{recipe}-tiny", out=tmp_path, target__path=folder, data__source="no such rows")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "run.yaml", "status.json"}


def test_a_model_to_go_on_from(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A student's own distribution is computed as the target's is."""
    tokenizer = train_tokenizer(TEXT, 300)
    config, message = ModelConfig(start_from=folder), f"model.start_from '{folder}' .*changes its logits"
    monkeypatch.setattr(projection, "_FACTORS", ())
    plain: Any = random_model("llama", vocab_size=300)
    with pytest.raises(RequestError, match=message):
        build("distill", plain, tokenizer=tokenizer, model=config, objective=TERMS)
    with pytest.raises(RequestError, match=message):
        target.student(Recipe(method="target", model=config), None, tokenizer)


LOADERS: dict[str, Callable[[Path, Backbone], object]] = {
    "bpd": load_bpd,
    "eagle": load_eagle,
    "eagle3": load_eagle,
    "medusa": load_medusa,
    "hydra": load_hydra,
}


@pytest.mark.parametrize("family", LOADERS)
def test_a_drafter_that_reads_the_projection_is_not_loaded(family: str, tmp_path: Path) -> None:
    """EAGLE-3, Medusa and Hydra draft by projections of their own."""
    backbone = make_target("qwen3")
    backbone.tokenizer = train_tokenizer(TEXT, 300)
    module: Any = make_on_target(family, backbone).module
    save_heads(module, tmp_path / "it", backbone, family=family, settings=asdict(module.config))
    LOADERS[family](tmp_path / "it", backbone)
    backbone.model.__class__ = type("Shifted", (Shifted, type(backbone.model)), {})
    if family not in ("bpd", "eagle"):
        LOADERS[family](tmp_path / "it", backbone)
        return
    with pytest.raises(RequestError, match="changes its logits behind"):
        LOADERS[family](tmp_path / "it", backbone)
