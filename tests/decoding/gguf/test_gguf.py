"""A model in a GGUF file is the model that the file was made of, and what cannot be read so is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decoding.backbone.hub import ends_of, load_config, load_tokenizer
from draftsmith.decoding.backbone.loading import load_model, load_target
from draftsmith.decoding.gguf import model as reading
from draftsmith.drafters.identity import TargetIdentity
from draftsmith.errors import EnvironmentFailure, RequestError
from helpers.models.gguf_files import pytestmark_gguf, write_gemma, write_llama

pytestmark = pytestmark_gguf
TEXT = "def f(a):\n    return  123 + a  # 45"


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


@pytest.mark.parametrize("write", [write_llama, write_gemma])
def test_the_model_that_it_was_made_of(write: Callable[..., Any], tmp_path: Path) -> None:
    """Heads in order, norms from zero on, windows and positions as they were."""
    made = write(tmp_path / "model.gguf")
    read = load_model(str(tmp_path / "model.gguf"))
    ids = list(range(4, 44))
    # norms are stored from one on, which rounds
    assert torch.allclose(logits(read, ids), logits(made, ids), atol=2e-5)
    assert type(read) is type(made)
    assert read.get_output_embeddings().weight is read.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rounded_weights_are_made_numbers_of(dtype: str, tmp_path: Path) -> None:
    made = write_llama(tmp_path / "model.gguf", kind="Q8_0")
    target = load_target(str(tmp_path / "model.gguf"), dtype=dtype)
    weights = target.model.model.layers[0].mlp.up_proj.weight
    assert weights.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    apart = (weights.float() - made.model.layers[0].mlp.up_proj.weight).abs().max()
    assert 0 < apart < 0.01
    assert target.model.hf_quantizer is None
    identity = TargetIdentity.of(target)
    assert (identity.name, identity.quantisation, identity.file) == ("model.gguf", "gguf Q8_0", "model.gguf")
    assert identity.sha256 == identity.to_dict()["sha256"]
    assert len(identity.sha256) == 64


def test_tokenizer_template_and_ends_are_the_files(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    path, own = str(tmp_path / "model.gguf"), load_tokenizer("tiny")
    tokenizer = load_tokenizer(path)
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer(TEXT).input_ids == own(TEXT).input_ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>user\na<|im_end|>\n"
    assert ends_of(path, load_config(path)) == (own.convert_tokens_to_ids("<|im_end|>"),)


@pytest.mark.parametrize(("layers", "scale"), [(62, 32), (48, 256)])
def test_the_largest_gemma_scales_its_queries_otherwise(layers: int, scale: int, tmp_path: Path) -> None:
    """A hidden size of 64 and two heads."""
    write_gemma(tmp_path / "model.gguf", fields={"gemma3.block_count": layers})
    assert load_config(str(tmp_path / "model.gguf")).query_pre_attn_scalar == scale


def test_the_end_of_a_turn_by_its_name(tmp_path: Path) -> None:
    """A base model's file states its end alone."""
    write_gemma(tmp_path / "model.gguf")
    path = str(tmp_path / "model.gguf")
    turn = load_tokenizer(path).convert_tokens_to_ids("<end_of_turn>")
    assert load_target(path).eos_ids == (1, turn)


def test_text_is_cut_as_the_file_says(tmp_path: Path) -> None:
    """Each digit alone, which changes what the spaces in front of it are."""
    write_llama(tmp_path / "model.gguf", fields={"tokenizer.ggml.pre": "smollm"})
    pieces = load_tokenizer(str(tmp_path / "model.gguf")).tokenize("a   12")
    assert pieces[-2:] == ["1", "2"]
    assert "".join(pieces[:-2]) == "aĠĠĠ"
    assert "ĠĠĠ" in pieces


def test_what_lies_beside_the_file_is_no_part_of_it(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    for name in ("adapter_config.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text('{"eos_token_id": 7, "auto_map": {"AutoTokenizer": "code.Code"}}')
    path = str(tmp_path / "model.gguf")
    assert load_target(path).eos_ids == (3,)
    assert len(load_tokenizer(path)) == 4096


def test_a_folder_that_holds_one_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    assert load_target(str(tmp_path)).name == str(tmp_path / "model.gguf")
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    with pytest.raises(RequestError, match=r"holds 2 GGUF files; name one of them, such as .*model.gguf"):
        load_target(str(tmp_path))


def test_positions_of_llama_3(tmp_path: Path) -> None:
    """A file holds the factors alone."""
    theta, half, factor = 10_000.0, 8, 8.0
    lengths = 2 * np.pi * theta ** (np.arange(half) / half)
    between = np.clip((8192 / lengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - between) / factor + between)).astype(np.float32)
    write_llama(tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    read = load_model(str(tmp_path / "model.gguf"))
    assert read.config.rope_parameters["rope_type"] == "llama3"
    expected = theta ** (-np.arange(half) / half) / factors
    assert torch.allclose(read.model.rotary_emb.inv_freq, torch.tensor(expected, dtype=torch.float32), rtol=1e-4)
    write_llama(tmp_path / "odd.gguf", tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(RequestError, match=r"factors \(rope_freqs.weight\) that are not those of Llama 3"):
        load_config(str(tmp_path / "odd.gguf"))


def cut_short(path: Path) -> None:
    write_llama(path)
    path.write_bytes(path.read_bytes()[:-1000])


def without_its_head(path: Path) -> None:
    write_llama(path)
    path.write_bytes(path.read_bytes()[:3000])


def part_of_three(path: Path) -> None:
    write_llama(path, fields={"split.count": 3, "split.no": 0})


def of_odd_bytes(path: Path) -> None:
    path.write_bytes(b"PK" * 100)


def of_no_known_type(path: Path) -> None:
    write_llama(path, tensors={"odd.weight": np.zeros(4, np.int64)})


def of_no_known_kind(path: Path) -> None:
    write_llama(path, fields={"general.architecture": "brand-new", "brand-new.block_count": 2})


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (cut_short, r"is cut short: it has [\d,]+ bytes, and its tensors reach to [\d,]+; fetch it again"),
    "no head": (without_its_head, "is cut short: it ends inside what it states of the model; fetch it again"),
    "a part": (part_of_three, r"is part 1 of 3 of a model, and parts are not read; join them by .*--merge"),
    "other bytes": (of_odd_bytes, "is no GGUF file, whatever its name says"),
    "a type": (of_no_known_type, "holds odd.weight in the type I64, of which the installed package gguf makes no"),
    "a kind": (of_no_known_kind, "is a model of kind 'brand-new', which transformers .* does not read from GGUF"),
    "a tensor over": (
        lambda path: write_llama(path, tensors={"blk.0.attn_q.bias": np.zeros(64, np.float32)}),
        r"more than transformers reads \(blk.0.attn_q.bias\); name the model that it was made from",
    ),
    "sizes": (lambda path: write_llama(path, fields={"llama.embedding_length": 128}), "fewer than the model needs"),
    "layers": (lambda path: write_llama(path, fields={"llama.block_count": 10**9}), "expected 1 to 1,000 layers"),
    "positions": (
        lambda path: write_llama(path, fields={"llama.rope.scaling.type": "yarn"}),
        r"turns positions by 'yarn' \(rope.scaling.type\), which transformers leaves out",
    ),
    "a factor": (
        lambda path: write_llama(path, fields={"llama.logit_scale": 0.5}),
        "states llama.logit_scale 0.5, and transformers reads logit_scale None",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_as_it_is_meant(what: str, tmp_path: Path) -> None:
    make, said = REFUSED[what]
    make(tmp_path / "model.gguf")
    with pytest.raises(RequestError, match=said):
        load_target(str(tmp_path / "model.gguf"))


TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"without": ["tokenizer.ggml.tokens"]}, "is missing or not whole: it has no tokenizer.ggml.tokens"),
    "no merges": ({"without": ["tokenizer.ggml.merges"]}, "is missing or not whole: it has no tokenizer.ggml.merges"),
    "types": ({"fields": {"tokenizer.ggml.token_type": [1, 1]}}, "it lists 4,096 tokens, and types for 2"),
    "a cut": ({"fields": {"tokenizer.ggml.pre": "newest"}}, r"cuts text by 'newest' \(tokenizer.ggml.pre\)"),
    "a kind": ({"fields": {"tokenizer.ggml.model": "rwkv"}}, "rwkv"),
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_tokenizer_that_is_not_whole(what: str, tmp_path: Path) -> None:
    how, said = TOKENIZERS[what]
    write_llama(tmp_path / "model.gguf", **how)
    with pytest.raises(RequestError, match=said):
        load_tokenizer(str(tmp_path / "model.gguf"))


def test_ways_that_need_a_folder(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    with pytest.raises(
        RequestError, match=r"target.quantization int8 needs a folder .*draftsmith convert .*model.gguf"
    ):
        load_target(str(tmp_path / "model.gguf"), quantization="int8")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "model.gguf")
    monkeypatch.setattr("draftsmith.decoding.gguf.file.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFailure, match=r"the package gguf, .*pip install 'draftsmith\[gguf\]'"):
        load_config(str(tmp_path / "model.gguf"))


def test_an_older_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "model.gguf")
    monkeypatch.setattr(reading.metadata, "version", lambda name: "5.20.0")
    with pytest.raises(EnvironmentFailure, match=r"transformers 5.20.0 makes another tokenizer of some; pip install"):
        load_config(str(tmp_path / "model.gguf"))
