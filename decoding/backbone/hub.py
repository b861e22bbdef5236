"""What a model's folder or hub name leads to without its weights: config, sizes, tokenizer.

If there is no such model, or its files are damaged, one clear message says so. `tiny` is the target that
ships with the package. Read next: `loading.py`, which reads weights.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ...errors import EnvironmentFailure, RequestError
from ...storage import MACHINE_ERRNOS, system_error
from ..gguf.file import find_gguf
from ..no_model import what_it_is
from .foreign import check_config, check_tokenizer_config, end_ids, raw_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
SEES_IMAGES = frozenset(("qwen2_5_vl", "qwen3_vl"))
"""Models of images and text whose text alone is decoded here: with equal positions in all three directions, as
`transformers` gives text, their rotation is the ordinary one. Others are known to it as causal LMs, or refused."""
_UNKNOWN = re.compile(r"has model type `([^`]*)` but Transformers does not recognize")
EMBEDDED = "tiny"
"""Name of the target that ships with the package."""


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model, no weights read.

    Raises:
        RequestError: there is none, or it chooses code and is not trusted.
    """
    with loading_errors("config of", path, "config.json"):
        return vetted_config(path, revision=revision, trust_remote_code=trust_remote_code)


def vetted_config(path: str, *, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """As `load_config`, for use inside `loading_errors`. The config's choice of attention is gone: it is ours."""
    from transformers import AutoConfig, PretrainedConfig

    source = folder_or_name(path)
    say_asked(path, revision)
    if (file := find_gguf(source)) is not None:
        return _config_of_gguf(path, file)
    if trust_remote_code:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    check_config(path, PretrainedConfig.get_config_dict(source, revision=revision)[0])
    config: Any = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None
    if hasattr(config, "auto_map"):
        _say_not_run(path)
        del config.auto_map
    return config


def _config_of_gguf(path: str, file: Path) -> PretrainedConfig:
    from ..gguf.model import gguf_config

    config: PretrainedConfig = gguf_config(file)
    check_config(path, json.loads(config.to_json_string()))
    config._attn_implementation = config._experts_implementation = None
    return config


@cache  # once is enough
def _say_not_run(path: str) -> None:
    _log.info(
        "%s names code of its own (auto_map in its config.json), which is not run: transformers has its class", path
    )


@cache
def say_asked(path: str, revision: str | None) -> None:
    """Say so before a wait: without a network the library tries for half a minute."""
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if HF_HUB_OFFLINE or Path(path).exists() or is_here(path, revision=revision):
        return
    with suppress(HFValidationError):  # no name that a hub knows, and refused at once
        validate_repo_id(path)
        hush_retries()
        _log.warning("no folder is called %r, and it was not fetched before: the hub is asked for it", path)


def hush_retries() -> None:
    """Keep the library's line for each of its tries from the screen: the last error says the same."""
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


def is_here(path: str, *, revision: str | None = None) -> bool:
    """Whether a model can be loaded without asking a hub: a folder, or fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    source = folder_or_name(path)
    if Path(source).is_dir() or find_gguf(source) is not None:
        return True
    try:
        return isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str)
    except HFValidationError:  # no name that a hub knows; whatever loads it says what is wrong
        return False


def load_sizes(name: str) -> PretrainedConfig:
    """The config of a model that is not here, from its config.json or a shipped one's name.

    Raises:
        RequestError: there is none, or it is no config.
    """
    shipped = Path(str(files("draftsmith.recipes"))) / "assets" / "sizes"
    own = shipped / f"{name}.json"
    if not own.is_file() and not Path(name).is_file():
        known = ", ".join(sorted(path.stem for path in shipped.glob("*.json")))
        raise RequestError(f"no sizes are called {name!r}; expected the path of a config.json, or one of {known}")
    return load_config(str(own if own.is_file() else name))


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        RequestError: there is none.
    """
    from transformers import AutoTokenizer

    with loading_errors("tokenizer of", path, "tokenizer.json"):
        source = folder_or_name(path)
        if (file := find_gguf(source)) is not None:
            from ..gguf.model import gguf_tokenizer

            made: PreTrainedTokenizerBase = gguf_tokenizer(file)
            return made
        here = Path(source).is_dir()
        say_asked(path, revision)
        if here and not trust_remote_code:
            check_tokenizer_config(path, source, revision)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        if (
            not here and not trust_remote_code
        ):  # before, each of its files would be waited for where there is no network
            check_tokenizer_config(path, source, revision)
        return tokenizer


def generation_ends(path: str) -> tuple[int, ...]:
    """The ids that end a text by the generation_config.json of a model that is here; none where it has no such file.

    Raises:
        RequestError: it is no table, or names something else than ids.
    """
    return end_ids(path, generation_settings(path).get("eos_token_id"))


def generation_settings(path: str, *, revision: str | None = None) -> dict[str, Any]:
    """The generation_config.json of a model that is here; empty where it has no such file.

    Raises:
        RequestError: it is no table.
    """
    if not path or not is_here(path, revision=revision):
        return {}
    with loading_errors("generation settings of", path, "generation_config.json"):
        raw = raw_json(folder_or_name(path), "generation_config.json", revision)
        if not isinstance(raw, dict | None):
            raise ValueError("generation_config.json holds no table of names and values")
    return raw or {}


def ends_of(path: str, config: Any) -> tuple[int, ...]:
    """The ids that end a text, of a model of which no weights are loaded.

    Raises:
        RequestError: its generation settings name something else than ids.
    """
    return generation_ends(path) or end_ids(path, getattr(config, "eos_token_id", None))


def folder_or_name(path: str) -> str:
    """Where a model is: the folder of the embedded target for its name, a folder's only GGUF file, else `path`."""
    if path == EMBEDDED:
        return embedded_target()
    file = find_gguf(path)
    return path if file is None else str(file)


def embedded_target() -> str:
    """Folder of the target that ships with the package."""
    folder = Path(str(files("draftsmith.recipes"))) / "assets" / "tiny-target"
    if not (folder / "config.json").is_file():
        raise RequestError(f"the embedded target is missing at {folder}; run `make tiny-target`")
    return str(folder)


@contextmanager
def loading_errors(what: str, path: str, files_expected: str) -> Iterator[None]:
    """Inside, `transformers` reads files of the model `path`.

    Raises:
        RequestError: in place of what `transformers` raises for missing or damaged files.
        EnvironmentFailure: the model needs a package that is not here, or the machine has no room or gives no right.
    """
    try:
        with _hub_without_its_log():
            yield
    except (RequestError, EnvironmentFailure):
        raise
    except ImportError as error:
        raise EnvironmentFailure(
            f"cannot load the {what} {path!r}: it needs a package that is not here: {_first_line(error)}"
        ) from error
    except BaseException as error:
        if (refused := _refused_by_the_machine(error)) is not None:
            raise EnvironmentFailure(
                f"cannot load the {what} {path!r}: {_first_line(refused)}; {_room(path)}"
            ) from error
        if not _is_fault(error):
            raise
        reason = _found(path, files_expected) or _reason(error)
        raise RequestError(
            f"cannot load the {what} {path!r}: {reason}; expected a folder with {files_expected}, a GGUF file, a "
            "hub name, or 'tiny'"
        ) from error


@contextmanager
def _hub_without_its_log() -> Iterator[None]:
    """Silence the hub's log: the error says that it cannot be reached, so no line for every try is needed."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _found(path: str, files_expected: str) -> str:
    """What the folder is instead, if its files tell."""
    return what_it_is(Path(path), of_config="config.json" in files_expected)


def _reason(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return (
            "it comes with code of its own, which is not run, and transformers has no class for it (read the code, "
            "and set target.trust_remote_code if you trust it)"
        )
    unknown = _UNKNOWN.search(str(error))
    if unknown is not None:
        import transformers

        return (
            f"transformers {transformers.__version__} has no class for its model_type {unknown[1]!r}: a newer one "
            "may, or take another model"
        )
    if "use_safetensors" in str(error):
        return "it has no safetensors weights, and a pickle (.bin) is never read: it can run code when it is"
    if isinstance(error, (OSError, ValueError)):
        return _first_line(error)
    # its words are about code, not files
    return f"its files are damaged ({type(error).__name__}: {' '.join(str(error).split()):.300})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def _refused_by_the_machine(error: BaseException) -> BaseException | None:
    """The system's error if a disk is full or read-only, or a right is missing: nothing is wrong with the model."""
    # transformers says some again in an OSError that has no number and no file
    both = (error, error.__cause__ or error.__context__)
    return next((each for each in both if each is not None and system_error(each) in MACHINE_ERRNOS), None)


def _room(path: str) -> str:
    """What to do where the machine is at fault."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if Path(folder_or_name(path)).is_dir():
        return "get the right to read the folder, or name a copy of it"
    return f"downloads are kept in {HF_HUB_CACHE}: make room or get the right there, or set HF_HOME to another folder"


def _is_fault(error: BaseException) -> bool:
    """Whether that is what `transformers` raises for files that are missing, damaged or of another shape."""
    from huggingface_hub.errors import StrictDataclassError

    kinds = (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        SafetensorError,
        StrictDataclassError,
    )
    # tokenizers raises Exception itself, and where its Rust code gives up what is no Exception
    return isinstance(error, kinds) or type(error) is Exception or type(error).__name__ == "PanicException"


def auto_class(config: Any) -> Any:
    """The class of `transformers` that picks the class of a target with that config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in SEES_IMAGES else AutoModelForCausalLM


def skeleton(config: Any, trust: bool = False) -> PreTrainedModel:
    """The causal LM of a config, its weights only shapes (on torch's meta device).

    Args:
        trust: run code that comes with the model.

    Raises:
        RequestError: the config is of no causal LM, or of none that can be built.
    """
    import torch

    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=trust)
    except ValueError as error:
        said = str(error).splitlines()[0]
        # what begins so lists all that there are
        why = "" if said.startswith("Unrecognized configuration class") else f": {said:.200}"
        raise RequestError(
            f"{config.model_type} is no causal LM{why}. Of models that read images too, "
            f"{', '.join(sorted(SEES_IMAGES))} are decoded on text, and those that transformers has as a causal LM "
            "(gemma3): take one of these, or a checkpoint of the text part alone"
        ) from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, ImportError) as error:
        raise RequestError(
            f"no {config.model_type} can be built of the sizes in its config.json ({type(error).__name__}: "
            f"{' '.join(str(error).split()):.200}); take the file anew from where it was published"
        ) from error
