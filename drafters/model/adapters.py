"""LoRA adapters on a draft model: several on one base, switched while it stays where it is.

Low-rank changes to linear layers (LoRA, Hu et al. 2021) by `peft`, one per domain for instance.
A drafter folder keeps the base as an ordinary model and each adapter in `adapters/NAME`, in peft's
own format. Switching changes which of them the layers add, and no tensor of the base.
Read next: `draft_model.py`; `trainers/student/lora.py`, which trains one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone, Seen
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.backbone.windows import Masks
from ...errors import RequestError
from ...storage import read_tensors, tensor_heads
from ..folder import REMEDY, built_from, check_exportable, names_in, not_finite
from ..sizes import check_number, check_sizes

if TYPE_CHECKING:
    from peft import LoraConfig

FOLDER, WEIGHTS = "adapters", "adapter_model.safetensors"
BASE = "base"
"""The name that means no adapter, in recipes and on the command line."""
_PEFT_PREFIX = "base_model.model."
_PEFT_BASE = "__base__"
# what a plain adapter's config may say; the rest has to be peft's default, as some of it chooses code (megatron_core
# is a module to import) and some copies layers
_ABOUT = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
_PLAIN = ("inference_mode", "r", "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora")
_TENSOR = re.compile(r"(.+\.lora_\w+)\.([^.]+)\.(\w+)")  # LAYER.lora_A.NAME.weight


def adapted_layers(model: nn.Module) -> list[Any]:
    """The layers that have adapters."""
    if not getattr(model, "peft_config", None):
        return []  # and `peft` is not imported for a model that has no adapters
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """The adapters that a model has, sorted."""
    return tuple(sorted({name for layer in adapted_layers(model) for name in layer.lora_A}))


def active_adapter(model: nn.Module) -> str | None:
    """The adapter that is added in forward passes; None for the base alone."""
    for layer in adapted_layers(model):
        return next(iter(layer.active_adapters), None)
    return None


def use(model: nn.Module, name: str | None) -> None:
    """Add that adapter from now on, or none of them; nothing is loaded, moved or trained by it.

    Raises:
        RequestError: there is no such adapter; the message lists those that there are.
    """
    chosen = [] if name is None else [name]
    _check_known(model, chosen)
    for layer in adapted_layers(model):
        layer.set_adapter(chosen, inference_mode=True)


def idle_weights(module: nn.Module, names: Collection[str] | None = None) -> set[int]:
    """Tensors, by `id`, of adapters that no forward pass reads: of all but `names`.

    `names` None: but those in use.
    """
    idle: set[int] = set()
    for layer in (each for model in module.modules() for each in adapted_layers(model)):
        read = layer.active_adapters if names is None else names
        for table in (layer.lora_A, layer.lora_B):
            idle |= {id(p) for name in table if name not in read for p in table[name].parameters()}
    return idle


class RowBackbone(Backbone):
    """A draft whose rows have adapters of their own: n adapters on one base decode as one batch.

    Row b of a KV cache is computed with `names[b]`, None being the base alone, whatever `use` has
    chosen for others that share the model. A draft over it is not recorded as a CUDA graph: peft
    picks the rows of an adapter on the host.
    """

    def __init__(self, backbone: Backbone, names: Sequence[str | None]) -> None:
        """Raises RequestError for an unknown name."""
        super().__init__(backbone.model, name=backbone.name, revision=backbone.revision)
        _check_known(self.model, [name for name in names if name is not None])
        self._names = [_PEFT_BASE if name is None else name for name in names]
        self._now: list[str] | None = None
        self._hooks = [
            layer.register_forward_pre_hook(self._add_names, with_kwargs=True) for layer in adapted_layers(self.model)
        ]

    def close(self) -> None:
        """Remove its hooks from the model. Also for `contextlib.closing`."""
        for hook in self._hooks:
            hook.remove()

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        kv_cache: KVCache,
        *,
        layers: Sequence[int] = (),
        features: list[Tensor] | None = None,
    ) -> Tensor:
        """As a `Backbone`; raises RequestError where rows and names differ in number."""
        if len(prompts) != len(self._names):
            raise RequestError(
                f"the draft has adapters for {len(self._names)} rows, and the batch has "
                f"{len(prompts)}; give `RowBackbone` one name for each row, None being the base"
            )
        return super().prefill(prompts, kv_cache, layers=layers, features=features)

    def _run(
        self,
        tokens: Tensor,
        mask: Masks | None,
        positions: Tensor,
        kv_cache: KVCache,
        *,
        keep: int,
        layers: Sequence[int] = (),
    ) -> Seen:
        self._now = self._names if kv_cache.row is None else [self._names[kv_cache.row]]
        try:
            return super()._run(tokens, mask, positions, kv_cache, keep=keep, layers=layers)
        finally:
            self._now = None

    def _add_names(self, _layer: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        return None if self._now is None else (inputs, {**named, "adapter_names": self._now})


def save_adapters(model: nn.Module, folder: Path) -> None:
    """Write every adapter of a model to `folder/adapters/NAME`, as peft does, in fp32."""
    from safetensors.torch import save_file

    whole: Any = model
    check_exportable(model)
    for name in adapter_names(model):
        own = folder / FOLDER / name
        own.mkdir(parents=True, exist_ok=True)
        weights = {
            _PEFT_PREFIX + key: tensor.detach().float().cpu().contiguous()
            for key, tensor in _weights(model, name).items()
        }
        save_file(weights, own / WEIGHTS, metadata={"format": "pt"})
        whole.peft_config[name].save_pretrained(str(own))


def load_adapters(model: nn.Module, folder: Path, names: Sequence[str]) -> None:
    """Put the adapters of a `save_adapters` folder into a model's layers; none of them is in use.

    Raises:
        RequestError: one is missing, of another kind than LoRA, does not fit the model, or holds NaN.
    """
    for name in names:
        own = folder / FOLDER / name
        config = _read_config(own)
        with built_from(own / "adapter_config.json", "an adapter for the model beside it"):
            _check_plain(config)
            _check_rank(config, own)
            inject(config, model, name)
        _fill(model, own, name)
    model.requires_grad_(False).eval()
    use(model, None)


def take_up(model: nn.Module, folder: Path, settings: Mapping[str, Any], asked: str | None) -> None:
    """Load the adapters that a folder's settings list, and use one.

    The one asked for by name, `base` being none; else the one that the folder's run has trained.

    Raises:
        RequestError: no adapter is called so, or one does not fit.
    """
    load_adapters(model, folder, names_in(settings, "adapters", folder))
    name = asked or settings.get("adapter") or BASE
    use(model, None if name == BASE else name)


def inject(config: LoraConfig, model: nn.Module, name: str) -> None:
    """Put a fresh adapter into the layers that its config names."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():  # of a second adapter beside the first, which is wanted
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter_in_model(config, model, adapter_name=name)


def _fill(model: nn.Module, folder: Path, name: str) -> None:
    wanted = _weights(model, name)
    path = folder / WEIGHTS
    given = {key.removeprefix(_PEFT_PREFIX): tensor for key, tensor in read_tensors(path, remedy=REMEDY).items()}
    odd = sorted(
        key
        for key in given.keys() | wanted.keys()
        if key not in given or key not in wanted or given[key].shape != wanted[key].shape
    )
    if odd:
        raise RequestError(
            f"{path} does not fit the model beside it: {odd[0]} is missing on one side or of "
            "another shape; an adapter belongs to the base that it was trained on"
        )
    unusable = not_finite(given)
    if unusable is not None:
        raise RequestError(f"{path} cannot be used: {unusable} holds NaN or infinity; train the adapter anew")
    for key, tensor in wanted.items():
        tensor.data.copy_(given[key])


def _read_config(folder: Path) -> LoraConfig:
    from peft import LoraConfig, PeftConfig

    # peft would ask a hub for a folder that is not there
    if not (folder / "adapter_config.json").is_file():
        raise RequestError(f"{folder} holds no adapter: adapter_config.json is missing; copy the whole folder again")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RecursionError) as error:
        raise RequestError(f"{folder}/adapter_config.json is no adapter of peft: {error!s:.200}") from error
    if not isinstance(config, LoraConfig) or config.use_dora or config.modules_to_save:
        raise RequestError(f"{folder} is no plain LoRA adapter; expected low-rank changes to linear layers alone")
    return config


def _check_plain(config: LoraConfig) -> None:
    """Raise ValueError for what the config of a plain adapter does not say."""
    from peft import LoraConfig as Lora

    usual = Lora()
    names = [each.name for each in fields(Lora) if each.name not in (*_ABOUT, *_PLAIN)]
    odd = next((name for name in names if _differs(config, usual, name)), None)
    if odd is not None:
        raise ValueError(f"{odd} is {getattr(config, odd)!r:.80}; expected peft's default, as of a plain adapter")
    layers: Any = config.target_modules
    if isinstance(layers, str) or not all(isinstance(name, str) for name in layers):
        raise ValueError(f"target_modules is {layers!r:.80}; expected a list of names, as matching may take for ever")
    check_sizes(r=config.r)
    check_number(0, lora_alpha=config.lora_alpha)


def _check_rank(config: LoraConfig, folder: Path) -> None:
    """Raise RequestError where the rank is not that of the weights: tensors of it are about to be made."""
    path = folder / WEIGHTS
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise RequestError(
            f"{folder} holds its adapter as a pickle (adapter_model.bin), which can run code when it is read and is "
            "never read here; write it anew as safetensors where you trust its origin, by save_pretrained of peft"
        )
    heads = tensor_heads(path, remedy=REMEDY).items()
    ranks = {head.shape[0] for name, head in heads if ".lora_A." in name and head.shape}
    if ranks != {config.r}:
        raise RequestError(
            f"{path} does not fit the model beside it: {folder}/adapter_config.json has the rank {config.r}, and its "
            f"tensors {', '.join(map(str, sorted(ranks))) or 'none'}; an adapter belongs to the base that it was "
            "trained on"
        )


def _differs(config: Any, usual: Any, name: str) -> bool:
    return bool(getattr(config, name, None) != getattr(usual, name, None))


def _weights(model: nn.Module, name: str) -> dict[str, Tensor]:
    """The tensors of one adapter as peft's files call them: without the adapter's name."""
    weights = {}
    for own, tensor in model.state_dict(keep_vars=True).items():
        parts = _TENSOR.fullmatch(own)  # a part of LAYER may be called as the adapter is
        if parts and parts[2] == name:
            weights[f"{parts[1]}.{parts[3]}"] = tensor
    return weights


def _check_known(model: nn.Module, names: Sequence[str]) -> None:
    known = adapter_names(model)
    for name in names:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise RequestError(f"the draft has no adapter {name!r}; {has}, and {BASE!r} means none of them")
