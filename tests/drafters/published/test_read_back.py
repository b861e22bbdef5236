"""Our own exports, read back: the same network to the bit, whatever form it was written in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.eagle.net import EagleNet, EagleShape
from draftsmith.drafters.eagle.net3 import Eagle3Net, Eagle3Shape
from draftsmith.drafters.export import ServedTarget, export_of
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.folder import save_heads
from draftsmith.drafters.heads.hydra import HydraHeads
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.mtp.layers import MtpShape
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.trainers.teacher.frozen import settings_of
from helpers.models.published_forms import VOCABULARY, WORDS
from helpers.models.small_drafters import small_block_net, small_dflash2_net, small_dspark_net, small_peagle_net
from safetensors.torch import save_file

STATES = {"layers": (1, 3, 6)}
TABLES = STATES | {"vocabulary": VOCABULARY}


def eagle3(model: Any, **chosen: Any) -> Eagle3Net:
    return Eagle3Net.for_target(model, **({"ids": WORDS, "layers": (2, 4, 5)} | chosen))


def narrow(model: Any) -> Eagle3Net:
    """Half as wide as its target."""
    shape = Eagle3Shape.of(model.config, layers=(2, 4, 5), vocabulary=VOCABULARY, draft_vocabulary=len(WORDS))
    return Eagle3Net(replace(shape, hidden=16, target_hidden=32, own_embedding=True), WORDS)


def eagle_with_bias(model: Any) -> EagleNet:
    net = EagleNet(replace(EagleShape.of(model.config), fc_bias=True))
    torch.nn.init.normal_(net.fc.bias)
    return net


def hydra(model: Any, **chosen: Any) -> HydraHeads:
    return HydraHeads.for_target(model, heads=3, as_published=True, **chosen)


def mimo(model: Any) -> MtpNet:
    return MtpNet(MtpShape.of(model.config, rotary=8, query_norm=False, bias=True, blank_first=True))


NETS: dict[str, Callable[[Any], Any]] = {
    "medusa": lambda model: MedusaHeads.for_target(model, heads=3, layers=2),
    "medusa, shared head": lambda model: MedusaHeads.for_target(model, heads=2, shared_head=True),
    "medusa, some tokens": lambda model: MedusaHeads.for_target(model, heads=2, ids=WORDS),
    "medusa, shared head, some tokens": lambda model: MedusaHeads.for_target(
        model, heads=2, shared_head=True, ids=WORDS
    ),
    "eagle": EagleNet.for_target,
    "eagle, bias": eagle_with_bias,
    "eagle3": eagle3,
    "eagle3, other states": lambda model: eagle3(model, **STATES),
    "eagle3, one state": lambda model: eagle3(model, layers=(4,)),
    "eagle3.1": lambda model: eagle3(model, feature_norms=True),
    "eagle3, norms of states alone": lambda model: eagle3(model, feature_norms=True, output_norm=False),
    "eagle3, a norm of what is fed back alone": lambda model: eagle3(model, output_norm=True),
    "eagle3, own embedding": lambda model: eagle3(model, own_embedding=True),
    "eagle3, head norms": lambda model: eagle3(model, head_norms=True),
    "eagle3, a norm of all states": lambda model: eagle3(model, norm_before_fc=True),
    "eagle3, narrower": narrow,
    "eagle3, normed residual": lambda model: eagle3(model, norm_before_residual=True),
    "peagle": lambda model: small_peagle_net(model, ids=WORDS, layers=(2, 4, 5), decoder_layers=3),
    "dflash": lambda model: small_block_net(model, **STATES),
    "dflash, unused id": lambda model: small_block_net(model, **STATES, mask_token=60),
    "dflash, causal": lambda model: small_block_net(model, **STATES, causal=True),
    "dflash, windows": lambda model: small_block_net(model, **STATES, windows=(6, None), causal_windows=True),
    "dflash, windows that see all of a block": lambda model: small_block_net(model, **STATES, windows=(6, 6)),
    "dspark": lambda model: small_dspark_net(model, **TABLES, confidence=True),
    "dspark, fill-in": lambda model: small_dspark_net(model, **TABLES, layout="fill-in"),
    "dspark, unused id": lambda model: small_dspark_net(model, **TABLES, mask_token=60),
    "dflash2": lambda model: small_dflash2_net(model, **TABLES, mask_token=60),
    "hydra": lambda model: hydra(model, layers=2),
    "hydra++": lambda model: hydra(model, prefix=True),
    "mtp": MtpNet.for_target,
    "mtp, biases": mimo,
}
REFUSED = {
    ("eagle, bias", "vllm"),
    ("eagle3.1", "llama.cpp"),
    ("eagle3, norms of states alone", "llama.cpp"),
    ("eagle3, a norm of what is fed back alone", "llama.cpp"),
    ("eagle3, one state", "llama.cpp"),
}
OWN = ("eagle3, normed residual", "eagle3, own embedding")
REFUSED |= {(name, engine) for name in OWN for engine in ("sglang", "tensorrt-llm")}
REFUSED |= {("eagle3, head norms", engine) for engine in ("vllm", "sglang", "tensorrt-llm", "llama.cpp")}
REFUSED |= {("eagle3, a norm of all states", engine) for engine in ("sglang", "tensorrt-llm", "llama.cpp")}
REFUSED |= {("eagle3, narrower", engine) for engine in ("speculators", "sglang", "tensorrt-llm", "llama.cpp")}
REFUSED |= {(name, "sglang") for name in ("dflash", "dflash, causal", "dspark", "dspark, fill-in")}
REFUSED |= {(f"dflash, windows{more}", "sglang") for more in ("", " that see all of a block")}

WIDER = {("medusa, shared head, some tokens", "vllm")}
"""Written with the projection's other rows too, so that what is read back drafts all tokens."""


def family_of(name: str) -> str:
    return name.partition(",")[0].partition(".")[0]


WAYS = [(name, form) for name in NETS for form in FAMILIES[family_of(name)].exports if (name, form) not in REFUSED]


def shaken(net: Any) -> Any:
    """Every weight something else, but for what is the target's own."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name != "mask_embedding.weight" or getattr(net.config, "mask_token", None) is None:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize(("name", "form"), WAYS)
def test_an_export_is_read_back_to_the_bit(name: str, form: str, deep: Backbone, tmp_path: Path) -> None:
    net, family = shaken(NETS[name](deep.model)), family_of(name)
    settings = settings_of(net.config)
    save_heads(net, tmp_path / "ours", deep, family=family, settings=settings)
    served = ServedTarget.of("org/target", deep.model.config, deep.model)
    made = export_of(
        tmp_path / "ours",
        family,
        json.loads(json.dumps(settings)),
        served,
        form,
        dtype="fp32",
        head_VH=deep.model.get_output_embeddings().weight,
        table=lambda: deep.model.get_input_embeddings().weight,
    )
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(made.config))
    save_file({key: t.clone() for key, t in made.tensors.items()}, tmp_path / "theirs" / "model.safetensors")
    mine, back = (load_drafter(tmp_path / each, deep, draft_length=3) for each in ("ours", "theirs"))
    weights, again = mine.module.state_dict(), back.module.state_dict()
    if (name, form) in WIDER:
        assert weights.keys() - again.keys() == {"d2t"}
        assert not [key for key in again if not torch.equal(weights[key], again[key])]
        assert back.module.config == replace(mine.module.config, draft_vocabulary=None)
        return
    assert weights.keys() == again.keys()
    assert not [key for key in weights if not torch.equal(weights[key], again[key])]
    assert back.module.config == mine.module.config
    one, other = (generate(deep, each, [[5, 9, 2]], max_new_tokens=12, warper=Warper(0.0)) for each in (mine, back))
    assert (one.tokens, one.origin, one.target_calls) == (other.tokens, other.origin, other.target_calls)


@pytest.mark.parametrize(("name", "form"), sorted(REFUSED))
def test_what_a_form_does_not_hold_is_refused(name: str, form: str, deep: Backbone, tmp_path: Path) -> None:
    """By what it is, in one message; nothing is left out without a word."""
    net, family = shaken(NETS[name](deep.model)), family_of(name)
    save_heads(net, tmp_path / "ours", deep, family=family, settings=settings_of(net.config))
    served = ServedTarget.of("org/target", deep.model.config, deep.model)
    settings = json.loads(json.dumps(settings_of(net.config)))
    with pytest.raises(RequestError, match=r"^the drafter('s)? .*"):
        export_of(tmp_path / "ours", family, settings, served, form, dtype="fp32")


def test_every_form_that_is_exported_is_read_back() -> None:
    """All but what an engine loads as it is, and what is refused above."""
    written = {(family.name, form) for family in FAMILIES.values() for form, how in family.exports.items() if how.make}
    assert {(family_of(name), form) for name, form in WAYS} == written
