"""The forms in which others publish drafters: one record each, told apart by tensors and words alone.

A record says by which tensors and words a folder is known, which of our names its tensors have, which of them are
the target's own once more, and which function makes our settings of its config. A new form is a new record. The
sources are the trainers' own writers and the engines' loaders; a folder's name says nothing. Read next: `files.py`,
what is looked at; `sizes.py`, the settings; `weights.py`, the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...errors import RequestError
from . import sizes
from .files import Files, check_no_pickles, files_of

Names = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class PublishedForm:
    """How a form is known, and what of ours it holds."""

    title: str
    family: str
    """Of ours, that drafts with it."""
    settings: Callable[[Files], dict[str, Any]]
    """Ours, of its config and shapes; `layers` may be the rule of `sizes.FUSED`, until the target is known."""
    has: tuple[str, ...]
    """Each fits the name of some tensor, whole."""
    lacks: tuple[str, ...] = ()
    """None fits the name of any tensor."""
    says: tuple[str, ...] = ()
    """Words that its config says, one of them."""
    names: Names = ()
    """What fits a tensor's whole name -> our name; None: it is not read. The first that fits counts."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the target's own once more: name -> `embedding` or `head`."""
    remade: str | None = None
    """In `weights.py`: what makes our weights of its tensors by our names, where names are not all."""
    states: Literal["fused", "of layers"] | None = None
    """Of which kind the hidden states are that it names; None: it names none."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Settings whose default differs between readers -> who takes the other one."""
    before_norm: bool = False
    """Whether some train it on states in front of the target's last norm."""
    masked: bool = False
    """Whether a row of its table is a mask's, and need not be the target's."""
    d2t_is_ids: bool = False
    """Whether its draft vocabulary is written as ids, never as offsets."""
    plain_rows: bool = False
    """Whether it reads the target's embedding as rows of the table, without a norm in front."""

    def fits(self, files: Files) -> bool:
        """Whether a folder is of this form."""
        return (
            all(_some(pattern, files) for pattern in self.has)
            and not any(_some(pattern, files) for pattern in self.lacks)
            and (not self.says or files.word(*self.says) is not None)
        )

    def ours(self, name: str) -> str | None:
        """Our name of a tensor; None where it is not read, KeyError where the form has no such tensor."""
        for pattern, made in (*self.names, *_NEVER_READ):
            match = re.fullmatch(pattern, name)
            if match:
                return None if made is None else match.expand(made)
        raise KeyError(name)


def _some(pattern: str, files: Files) -> bool:
    return any(re.fullmatch(pattern, name) for name in files.heads)


# the last norm and the head of the target, which some trainers keep beside the drafter, and what a buffer was
_NEVER_READ: Names = ((r"verifier_(norm|lm_head)\..*", None), (r".*rotary_emb\.inv_freq", None))
_ATTENTION = r"self_attn\.[qkvo]_proj\.weight"
_LAYER = rf"({_ATTENTION}|mlp\.(?:gate|up|down)_proj\.weight|[a-z_]*norm\.weight)"
_NORMED_LAYER = _LAYER.replace("(", r"(self_attn\.[qk]_norm\.weight|", 1)
_FIRST = r"(?:midlayer|layers\.0)"
_TARGETS = {"embed_tokens.weight": "embedding"}

_EAGLE = PublishedForm(
    title="EAGLE-1 and EAGLE-2",
    family="eagle",
    settings=sizes.eagle,
    has=(r"fc\.weight", r"layers\.0\.self_attn\.q_proj\.weight", r"layers\.0\.mlp\.up_proj\.weight"),
    lacks=(r".*hidden_norm\.weight", r"layers\.0\.input_layernorm\.weight", r"midlayer\..*", r"mtp_layers\..*"),
    names=((r"(fc\.(?:weight|bias))", r"\1"), (rf"(layers\.0\.{_LAYER})", r"\1")),
    copies=_TARGETS | {"lm_head.weight": "head"},
    remade="of_eagle",
    plain_rows=True,
)
_ADDED = {"norm_before_residual": "the default of vLLM where the word is missing"}
_EAGLE3 = PublishedForm(
    title="EAGLE-3",
    family="eagle3",
    settings=sizes.eagle3,
    has=(r"fc\.weight", rf"{_FIRST}\.hidden_norm\.weight", rf"{_FIRST}\.self_attn\.q_proj\.weight"),
    lacks=(r"mask_hidden",),
    names=(
        (rf"{_FIRST}\.{_NORMED_LAYER}", r"midlayer.\1"),
        (r"((?:fc|norm|lm_head|input_norm|fc_norm\.\d+)\.weight|d2t|t2d)", r"\1"),
    ),
    copies=_TARGETS,
    remade="of_eagle3",
    states="fused",
    flags={**_ADDED, "output_norm": "norm_output, which is false where it is missing, and true to SpecForge"},
)
_PEAGLE = replace(
    _EAGLE3,
    title="P-EAGLE",
    family="peagle",
    settings=sizes.peagle,
    has=(*_EAGLE3.has, r"mask_hidden"),
    lacks=(),
    names=(
        *_EAGLE3.names,
        (rf"layers\.(\d+)\.{_NORMED_LAYER}", r"layers.\1.\2"),  # numbered from 1, and renumbered when remade
        (r"mask_hidden", "mask_hidden.weight"),
    ),
    remade="of_peagle",
    flags=_ADDED,
    masked=True,
)
_BLOCK_LAYER = rf"(layers\.\d+\.(?:{_ATTENTION}|self_attn\.[qk]_norm\.weight|mlp\..*|[a-z_]*layernorm\.weight))"
_DFLASH = PublishedForm(
    title="DFlash",
    family="dflash",
    settings=sizes.dflash,
    has=(r"fc\.weight", r"hidden_norm\.weight", r"layers\.0\.self_attn\.q_norm\.weight"),
    lacks=(r"candidate_selector\..*", r"markov_head\..*", r"confidence_head\..*"),
    names=((_BLOCK_LAYER, r"\1"), (r"((?:fc|norm|hidden_norm)\.weight)", r"\1"), (r"(d2t|t2d)", r"\1")),
    copies=_TARGETS | {"lm_head.weight": "head"},
    remade="of_block",
    states="of layers",
    flags={"causal": "what some readers make of sliding_window_non_causal"},
    masked=True,
    plain_rows=True,
)
_DSPARK = replace(
    _DFLASH,
    title="DSpark",
    family="dspark",
    settings=sizes.dspark,
    has=(*_DFLASH.has, r"markov_head\.markov_w1\.weight"),
    lacks=(r"candidate_selector\..*",),
    names=(
        *_DFLASH.names,
        (r"(markov_head\.markov_w[12]\.weight)", r"\1"),
        (r"(confidence_head\.proj\.(?:weight|bias))", r"\1"),
    ),
    remade="of_dspark",
)
_DFLASH2 = replace(
    _DFLASH,
    title="DFlash 2",
    family="dflash2",
    settings=sizes.dflash2,
    has=(*_DFLASH.has, r"candidate_selector\.predecessor_codebook.*"),
    lacks=(),
    names=(
        *_DFLASH.names,
        (r"(candidate_selector\.(?:predecessor|successor)_codebook)(?:\.weight)?", r"\1.weight"),
        (r"(candidate_selector\.hidden_projection\.weight)", r"\1"),
        (r"(layers\.\d+\.(?:attention|mlp)_conv\.(?:base_kernel|kernel_projection\.weight))", r"\1"),
    ),
)
_MEDUSA = PublishedForm(
    title="Medusa",
    family="medusa",
    settings=sizes.medusa,
    has=(r"0\.0\.linear\.weight|blocks\.0\.layers\.0\.weight",),
    lacks=(r"hydra.*",),
    names=(
        (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.layers.\2.\3"),
        (r"(blocks\.\d+\.layers\.\d+\.(?:weight|bias))", r"\1"),
        (r"(\d+)\.\d+\.weight|lm_heads\.(\d+)\.weight", r"lm_heads.\1\2.weight"),
        (r"token_map", "d2t"),
    ),
    copies={"lm_head.weight": "head"},
    remade="of_medusa",
    d2t_is_ids=True,
)
_HYDRA = PublishedForm(
    title="Hydra",
    family="hydra",
    settings=sizes.hydra,
    has=(r"hydra_mlp\.0\.\d+\.linear\.weight", r"hydra_lm_head\.0.*\.weight"),
    lacks=(r"prefix_embeding_layer\..*",),
    names=(
        (r"hydra_mlp\.(\d+)\.(\d+)\.res_connection\.(weight|bias)", r"blocks.\1.passed.\3"),
        (r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.\3"),  # numbered anew when remade
        (r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)", r"lm_heads.\1.\2"),
    ),
    copies={"input_embed_fn.weight": "embedding"},
    remade="of_hydra",
)
_HYDRA_PLUS = replace(
    _HYDRA,
    title="Hydra++",
    family="hydra++",
    has=(*_HYDRA.has, r"prefix_embeding_layer\.layers\.0\.self_attn\.q_proj\.weight"),
    lacks=(),
    names=(
        *_HYDRA.names,
        (r"prefix_embeding_layer\.embed_tokens\.weight", None),  # it is given states, and embeds nothing
        (rf"prefix_embeding_layer\.layers\.0\.{_LAYER}", r"prefix.\1"),
        (r"prefix_embeding_layer\.norm\.weight", "prefix.norm.weight"),
    ),
)
_MTP = PublishedForm(
    title="MTP of speculators",
    family="mtp",
    settings=sizes.mtp,
    has=(r"mtp_layers\.0\.input_proj\.weight", r"mtp_layers\.0\.self_attn\.q_proj\.weight"),
    says=("speculators_model_type",),
    names=(
        (r"mtp_layers\.0\.input_proj\.weight", "fc.weight"),
        (r"mtp_layers\.0\.token_layernorm\.weight", "pre_fc_norm_embedding.weight"),
        (r"mtp_layers\.0\.hidden_layernorm\.weight", "pre_fc_norm_hidden.weight"),
        (r"mtp_layers\.0\.final_layernorm\.weight", "norm.weight"),
        (r"mtp_layers\.0\.((?:self_attn|mlp|input_layernorm|post_attention_layernorm)\..*)", r"layers.0.\1"),
    ),
    copies=_TARGETS | {"lm_head.weight": "head"},
    flags={"blank_first": "engines leave out the embedding of position 0"},
    before_norm=True,
)
_MTP_MIMO = replace(
    _MTP,
    title="MTP in the form of MiMo's class",
    settings=sizes.mtp_of_mimo,
    says=("num_nextn_predict_layers",),
    remade="of_mimo",
)
_MTP_EXAONE = replace(
    _MTP,
    title="MTP in the form of EXAONE-MoE's class",
    has=(r"mtp\.fc\.weight", r"mtp\.layers\.0\.self_attn\.q_proj\.weight"),
    lacks=(r"layers\..*",),  # a target's own checkpoint, whose module is read by `mtp.from_target`
    says=("num_nextn_predict_layers",),
    names=((r"mtp\.(.*)", r"\1"),),
)
_PARD = PublishedForm(
    title="PARD",
    family="pard",
    settings=lambda _files: {},
    has=(r"layers\.0\.self_attn\.q_proj\.weight", r"embed_tokens\.weight"),
    lacks=(r"fc\.weight", r"mask_hidden"),
    says=("pard_token",),
)
FORMS = (
    *(_EAGLE, _EAGLE3, _PEAGLE, _DFLASH, _DSPARK, _DFLASH2),
    *(_MEDUSA, _HYDRA, _HYDRA_PLUS, _MTP, _MTP_MIMO, _MTP_EXAONE, _PARD),
)
"""No folder fits two of them."""


@dataclass(frozen=True)
class Published:
    """A folder that others wrote, and its form."""

    files: Files
    form: PublishedForm

    @property
    def says_target(self) -> str:
        """Which target it was made for, as far as its config says."""
        config = self.files.config
        own = config.get("speculators_config")
        verifier = own.get("verifier") if isinstance(own, Mapping) else None
        named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        return str(named or config.get("base_model_name_or_path") or "another one")


def published(folder: Path) -> Published | None:
    """The form of a folder that others wrote; None where it is of none that is read.

    Raises:
        RequestError: its weights are damaged, or pickles in what else would be one.
    """
    files = files_of(folder)
    if files is None or OURS in files.config:
        return None
    found = [form for form in FORMS if form.fits(files)]
    if found:
        return Published(files, found[0])
    if _of_a_drafter(files):
        check_no_pickles(files)
    return None


OURS = "draftsmith"
"""The entry of a config that we wrote."""
_WORDS = (
    "medusa_num_heads",
    "hydra_num_heads",
    "draft_vocab_size",
    "dflash_config",
    "eagle_config",
    "speculators_model_type",
)


def _of_a_drafter(files: Files) -> bool:
    """Whether a config seems to be a drafter's: only then is it said that its pickles are not read."""
    named = " ".join(map(str, files.config.get("architectures") or ()))
    plain = str(files.config.get("model_type", "")) == "llama" and files.config.get("num_hidden_layers") == 1
    return (
        plain or any(word in files.config for word in _WORDS) or bool(re.search("Eagle|DFlash|DSpark|Medusa", named))
    )


def unknown(folder: Path) -> str:
    """What was found in a folder of no form that is read, and which forms are: a part of a message."""
    files = files_of(folder)
    if files is None or not files.heads:
        return ""
    words = {name: files.config[name] for name in ("architectures", "model_type") if name in files.config}
    names = ", ".join([*files.heads][:4])
    return (
        f", nor is it a published drafter that is read ({', '.join(form.title for form in FORMS)}): its config says "
        f"{words}, and its {len(files.heads)} tensors are {names}{', ...' * (len(files.heads) > 4)}"
    )


def need_tensors(found: Published) -> dict[str, str]:
    """The tensors that are read, by our names -> theirs.

    Raises:
        RequestError: there is one that the form does not have.
    """
    form, made = found.form, {}
    for name in found.files.heads:
        if name in form.copies:
            continue
        try:
            ours = form.ours(name)
        except KeyError:
            if name.endswith(".bias"):
                continue  # looked at when it is read: zeros say nothing
            raise RequestError(
                f"{found.files.folder} is a drafter in the form of {form.title}, and also holds {name} "
                f"{list(found.files.shape(name))}, which that form does not have: what it would do is not known here, "
                "and a drafter that is read in part drafts nonsense"
            ) from None
        if ours is not None:
            made[ours] = name
    return made
