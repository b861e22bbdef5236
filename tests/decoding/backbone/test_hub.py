"""A machine that cannot hold or read a model's files is told from a model that is wrong."""

from __future__ import annotations

import builtins
import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decoding.backbone.hub import load_config, load_tokenizer
from draftsmith.decoding.backbone.loading import load_model, load_target
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.launch.cli import main


def failing(number: int) -> Callable[..., Any]:
    """A download or a file that the system refuses."""

    def fail(*_args: Any, **_keywords: Any) -> Any:
        raise OSError(number, os.strerror(number), "/cache/blob")

    return fail


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_model])
@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EACCES"])
def test_a_download_without_room_or_right(name: str, load: Callable[[str], Any], monkeypatch: Any) -> None:
    """`transformers` passes some of them on, and says others again without their number."""
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", failing(getattr(errno, name)))
    with pytest.raises(EnvironmentFailure, match=r"'somebody/model'.*/cache/blob.*HF_HOME"):
        load("somebody/model")


def test_a_number_that_is_in_the_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tokenizers and the hub's downloader have it, which are written in Rust."""

    def fail(*_args: Any, **_keywords: Any) -> Any:
        raise RuntimeError("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", fail)
    with pytest.raises(EnvironmentFailure, match="No space left"):
        load_config("somebody/model")


def test_a_folder_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config, plain, rows = tmp_path / "config.json", builtins.open, tmp_path / "rows.jsonl"
    config.write_text("{}")
    rows.write_text('{"prompt": "a"}\n')
    refuse = failing(errno.EACCES)
    monkeypatch.setattr(
        builtins, "open", lambda file, *args, **kw: (refuse if str(file) == str(config) else plain)(file, *args, **kw)
    )
    words = ["generate", "--target", str(tmp_path), "--source", str(rows), "--out", str(tmp_path / "out")]
    assert main(words) == 4
    said = capfd.readouterr().err
    assert "Permission denied" in said
    assert "get the right to read the folder" in said
    assert "unexpected" not in said


def test_what_is_wrong_with_the_model_is_still_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", failing(errno.ECONNREFUSED))
    with pytest.raises(RequestError, match="cannot load the config of 'somebody/model'"):
        load_config("somebody/model")


@pytest.mark.parametrize(
    "how",
    [
        {"quant_method": "evil"},
        {"quant_method": "mxfp4"},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "autoquant", "_data": {}}}},
    ],
)
def test_quantised_weights_are_no_reason_to_trust(how: dict[str, str], tmp_path: Path) -> None:
    """Trust would run whatever else the folder brings."""
    config = {"model_type": "qwen3", "quantization_config": how, "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"quantised.*take the unquantised model \(bf16\)") as no:
        load_config(str(tmp_path))
    assert "trust" not in str(no.value)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([], "it is the folder of an unfinished run"),
        (["drafter"], "it is the folder of a run; name {run}/drafter;"),
        (["drafter", "target"], "it is the folder of a run; name {run}/target;"),
    ],
)
def test_a_runs_folder_is_taken_for_no_model(made: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("method: eagle")
    for name in made:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(RequestError, match=re.escape(said.format(run=tmp_path))):
        load_config(str(tmp_path))


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_model])
@pytest.mark.parametrize(
    ("name", "offline", "said"), [("asked/for", False, 1), ("not/asked", True, 0), ("/x/y", False, 0)]
)
def test_the_hub_is_named_before_it_is_waited_for(
    name: str,
    offline: bool,
    said: int,
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"{name}-{load.__name__}"  # each is said once
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", failing(errno.ENETUNREACH))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    for _ in range(2):
        with pytest.raises((RequestError, EnvironmentFailure)):
            load(name)
    assert caplog.text.count(f"no folder is called {name!r}") == said


@pytest.mark.parametrize("dtype", ["float8", None])
def test_a_dtype_that_nothing_is_loaded_in_is_refused_by_name(served_folder: Path, dtype: Any) -> None:
    with pytest.raises(RequestError, match=f"the dtype .* is {dtype!r}; expected one of 'fp32', 'bf16', 'fp16'"):
        load_target(str(served_folder), dtype=dtype)
