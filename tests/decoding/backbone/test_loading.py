"""Older releases of transformers: what they compute wrongly is refused, or computed otherwise."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.decoding.backbone.attention import NAME, OWN, use_grouped_attention
from draftsmith.decoding.backbone.loading import check_release, keep_soft_cap, load_model
from draftsmith.errors import EnvironmentFailure
from helpers.models.random_models import random_model


@pytest.mark.parametrize(("release", "refused"), [("5.17.0", True), ("5.22.9", True), ("5.23.0", False)])
def test_a_family_that_a_release_gets_wrong_is_refused(
    release: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is loaded, before its weights are looked for."""
    doge, llama = random_model("doge"), random_model("llama")
    doge.config.num_experts = 4
    doge.config.save_pretrained(tmp_path)
    monkeypatch.setattr(metadata, "version", lambda _package: release)
    check_release(llama.config)
    if not refused:
        check_release(doge.config)
        return
    message = rf"transformers {release} computes models of type doge wrongly.*pip install 'transformers>=5.23'"
    with pytest.raises(EnvironmentFailure, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("release", "refused"), [("5.17.0", True), ("5.23.0", False)])
def test_a_family_that_a_release_cannot_run_is_refused(
    release: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = SimpleNamespace(get_text_config=lambda **_: SimpleNamespace(model_type="olmo_hybrid"))
    monkeypatch.setattr(metadata, "version", lambda _package: release)
    if not refused:
        check_release(config)
        return
    with pytest.raises(EnvironmentFailure, match=r"type olmo_hybrid wrongly, or not at all.*'transformers>=5.23'"):
        check_release(config)


@pytest.mark.parametrize(("cap", "implementation"), [(0.5, OWN), (None, NAME)])
def test_a_cap_does_not_depend_on_what_a_release_gives_to_sdpa(cap: float | None, implementation: str) -> None:
    """Transformers 5.17 lets Gemma 2 take SDPA, and leaves the cap out."""
    chosen = ["sdpa"]
    config = SimpleNamespace(attn_logit_softcapping=cap, _attn_implementation="sdpa")
    config.get_text_config = lambda **_: config

    def choose(name: str) -> None:
        chosen.append(name)
        config._attn_implementation = name

    model: Any = SimpleNamespace(
        config=config, set_attn_implementation=choose, _supports_attention_backend=True, _supports_sdpa=True
    )
    keep_soft_cap(model)
    use_grouped_attention(model)
    assert config._attn_implementation == chosen[-1] == implementation
