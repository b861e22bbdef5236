"""Drafters as others publish them, written from descriptions of their forms alone, and small networks that compute them.

Nothing here knows the package: names, config words and arithmetic are those of the published code, so that what is
read can be held against it.

Shapes: S tokens of a text, F numbers of the target's states side by side, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV, SIZE, VOCABULARY, LAYERS = 32, 40, 4, 2, 8, 300, 8
WORDS = [word for word in range(VOCABULARY) if word % 3 != 1]
Tensors = dict[str, Tensor]


@dataclass
class Text:
    """A text as the target has read it: `states` [S, H] by their number, 0 being the embedding."""

    tokens: list[int]
    states: list[Tensor]
    table: Tensor
    head: Tensor

    def fused(self, *numbers: int) -> Tensor:
        return torch.cat([self.states[number] for number in numbers], -1)


@dataclass
class Folder:
    """What one publishes: config, tensors, and the logits that its network makes along a text, by depth."""

    family: str
    config: dict[str, Any]
    tensors: Tensors
    logits: Callable[[Text], list[Tensor]]

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: t.contiguous().clone() for name, t in self.tensors.items()}, folder / "model.safetensors")
        return folder


# ---- arithmetic -------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """[heads, S, D], as pairs of the two halves."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)


def heads(x: Tensor, weight: Tensor, count: int, norm: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    made = x @ weight.T if bias is None else x @ weight.T + bias
    split = made.view(len(x), count, -1).transpose(0, 1)
    return split if norm is None else rms(split, norm)


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    group = len(query) // len(key)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (weights @ value).transpose(0, 1).flatten(1)


def layer(t: Tensors, at: str, read: Tensor, residual: Tensor, theta: float = 10_000.0) -> Tensor:
    """A Llama layer behind its first norm, over a text from its first token on."""
    positions, a = torch.arange(len(read)), f"{at}.self_attn."
    norms, biases = ([t.get(f"{a}{name}_{part}") for name in "qkv"] for part in ("norm.weight", "proj.bias"))
    query = turn(heads(read, t[f"{a}q_proj.weight"], HEADS, norms[0], biases[0]), positions, theta)
    key = turn(heads(read, t[f"{a}k_proj.weight"], KV, norms[1], biases[1]), positions, theta)
    value = heads(read, t[f"{a}v_proj.weight"], KV, bias=biases[2])
    seen = torch.ones(len(read), len(read), dtype=torch.bool).tril()
    out = residual + attend(query, key, value, seen) @ t[f"{a}o_proj.weight"].T
    return out + feed_forward(t, at, rms(out, t[f"{at}.post_attention_layernorm.weight"]))


def feed_forward(t: Tensors, at: str, x: Tensor) -> Tensor:
    gate, up, down = (t[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def spread_out(logits: Tensor, ids: list[int]) -> Tensor:
    wide = torch.full((len(logits), VOCABULARY), -math.inf)
    wide[:, ids] = logits
    return wide


# ---- tensors ----------------------------------------------------------------------------------------


def drawn(*shape: int, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(*shape)


def norm_weight(size: int = HIDDEN) -> Tensor:
    return 1 + drawn(size)


def layer_tensors(
    at: str, width: int, norms: tuple[str, ...], *, head_norms: bool = False, inner: int = INNER, hidden: int = HIDDEN
) -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * SIZE, width),
        "self_attn.k_proj": (KV * SIZE, width),
        "self_attn.v_proj": (KV * SIZE, width),
        "self_attn.o_proj": (hidden, HEADS * SIZE),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    made = {f"{at}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
    made |= {f"{at}.{name}.weight": norm_weight(hidden) for name in norms}
    if head_norms:
        made |= {f"{at}.self_attn.{name}_norm.weight": norm_weight(SIZE) for name in "qk"}
    return made


LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
PAIR_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def offsets(ids: list[int]) -> Tensor:
    return torch.tensor(ids) - torch.arange(len(ids))


def known(ids: list[int]) -> Tensor:
    table = torch.zeros(VOCABULARY, dtype=torch.bool)
    table[ids] = True
    return table


# ---- EAGLE ------------------------------------------------------------------------------------------


def eagle1(_target: Any) -> Folder:
    """yuhuili's: a bias, and no word of rotary positions."""
    t = {"fc.weight": drawn(HIDDEN, 2 * HIDDEN), "fc.bias": drawn(HIDDEN)}
    t |= layer_tensors("layers.0", HIDDEN, ("post_attention_layernorm",))

    def logits(text: Text) -> list[Tensor]:
        pair = torch.cat((text.table[text.tokens[1:]], text.states[-1][:-1]), -1)
        read = pair @ t["fc.weight"].T + t["fc.bias"]
        return [layer(t, "layers.0", read, read) @ text.head.T]

    return Folder("eagle", LLAMA | {"architectures": ["LlamaForCausalLM"]}, t, logits)


def pair_net(
    t: Tensors, at: str, fused: Tensor, embeds: Tensor, *, residual: bool = False, theta: float = 1e4
) -> Tensor:
    """EAGLE-3's layer; `residual`: adds to the normed state."""
    normed = rms(fused, t[f"{at}.hidden_norm.weight"])
    read = torch.cat((rms(embeds, t[f"{at}.input_layernorm.weight"]), normed), -1)
    return layer(t, at, read, normed if residual else fused, theta)


def eagle3_tensors(at: str, ids: list[int] | None, *, head_norms: bool = False, hidden: int = HIDDEN) -> Tensors:
    t = {"fc.weight": drawn(hidden, 3 * HIDDEN), "norm.weight": norm_weight(hidden)}
    t |= layer_tensors(at, 2 * hidden, PAIR_NORMS, head_norms=head_norms, hidden=hidden)
    if ids is not None:
        t |= {"lm_head.weight": drawn(len(ids), hidden), "d2t": offsets(ids), "t2d": known(ids)}
    return t


def eagle3(
    config: dict[str, Any], t: Tensors, at: str, states: tuple[int, ...], ids: list[int] | None, **how: Any
) -> Folder:
    words, normed_output = ids or list(range(VOCABULARY)), config.get("norm_output") and at != "midlayer"

    def logits(text: Text) -> list[Tensor]:
        table = t["embed_tokens.weight"] if config.get("target_hidden_size") else text.table
        fused, embeds = text.fused(*states)[:-1], table[text.tokens[1:]]
        if "input_norm.weight" in t:
            fused = rms(fused, t["input_norm.weight"])
        if "fc_norm.0.weight" in t:
            parts = fused.split(HIDDEN, -1)
            fused = torch.cat([rms(part, t[f"fc_norm.{k}.weight"]) for k, part in enumerate(parts)], -1)
        fused, head = fused @ t["fc.weight"].T, t.get("lm_head.weight", text.head)
        out = pair_net(t, at, fused, embeds, **how)
        fed = rms(out, t["norm.weight"]) if normed_output else out
        # a draft behind each pair: its output stands for the state that the target has not made
        longer = [torch.cat((fused[: a + 1], fed[a : a + 1])) for a in range(len(out) - 1)]
        second = torch.stack([pair_net(t, at, each, embeds[: len(each)], **how)[-1] for each in longer])
        return [spread_out(rms(each, t["norm.weight"]) @ head.T, words) for each in (out, second)]

    return Folder("eagle3", config, t, logits)


NATIVE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}
SPECULATORS3 = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LLAMA,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}},
}


def eagle3_specforge(_target: Any) -> Folder:
    """Nested numbers of layers, counted by the layer behind which a state stands; rotary positions of its own."""
    config = NATIVE3 | {
        "draft_vocab_size": len(WORDS),
        "rope_theta": 500.0,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
        "auto_map": {"AutoModel": "modeling.Evil"},
    }
    return eagle3(config, eagle3_tensors("midlayer", WORDS), "midlayer", (1, 3, 6), WORDS, theta=500.0)


def eagle3_whole(_target: Any) -> Folder:
    """No head of its own and no word of states: the target's head, and the default of every engine."""
    config = NATIVE3 | {"draft_vocab_size": None}
    return eagle3(config, eagle3_tensors("layers.0", None), "layers.0", (2, 4, 5), None)


def eagle3_angelslim(_target: Any) -> Folder:
    """The ids themselves in place of offsets, in no order, in files with `model.` in front."""
    ids = [WORDS[-1], *WORDS[:-1]]
    t = eagle3_tensors("midlayer", ids)
    t["d2t"] = torch.tensor(ids)
    made = eagle3(NATIVE3 | {"draft_vocab_size": len(ids)}, t, "midlayer", (2, 4, 5), ids)
    made.tensors = {f"model.{name}": tensor for name, tensor in t.items()}
    return made


def eagle3_redhat(target: Any) -> Folder:
    """speculators' form, which adds to the normed state and holds the target's embedding."""
    config = SPECULATORS3 | {
        "norm_before_residual": True,
        "draft_vocab_size": len(WORDS),
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
    }
    t = eagle3_tensors("layers.0", WORDS)
    made = eagle3(config, t, "layers.0", (1, 4, 6), WORDS, residual=True)
    extra = {"embed_tokens.weight": target.get_input_embeddings().weight.detach().clone()}
    made.tensors = t | extra | {"verifier_lm_head.weight": drawn(VOCABULARY, HIDDEN), "verifier_norm.weight": drawn(4)}
    return made


def eagle31(_target: Any) -> Folder:
    """Norms of 3.1, in speculators' form."""
    t = eagle3_tensors("layers.0", WORDS)
    t |= {f"fc_norm.{k}.weight": norm_weight() for k in range(3)}
    return eagle3(SPECULATORS3 | {"fc_norm": True, "norm_output": True}, t, "layers.0", (2, 4, 5), WORDS)


def eagle3_states_normed(_target: Any) -> Folder:
    """SpecForge's 3.1, of which vLLM reads the norms of the states alone."""
    t = eagle3_tensors("layers.0", WORDS) | {f"fc_norm.{k}.weight": norm_weight() for k in range(3)}
    return eagle3(NATIVE3 | {"norm_output": False, "fc_norm": True}, t, "layers.0", (2, 4, 5), WORDS)


def eagle3_output_normed(_target: Any) -> Folder:
    """An option of speculators."""
    return eagle3(
        SPECULATORS3 | {"norm_output": True}, eagle3_tensors("layers.0", WORDS), "layers.0", (2, 4, 5), WORDS
    )


def eagle3_qwen(_target: Any) -> Folder:
    """speculators' default: a layer of Qwen3, with norms of query and key; and one norm of all states."""
    config = SPECULATORS3 | {"transformer_layer_config": LLAMA | {"model_type": "qwen3"}, "norm_before_fc": True}
    t = eagle3_tensors("layers.0", WORDS, head_norms=True) | {"input_norm.weight": norm_weight(3 * HIDDEN)}
    return eagle3(config, t, "layers.0", (2, 4, 5), WORDS)


def eagle3_narrow(_target: Any) -> Folder:
    """SpecForge's, half as wide as the target, with an embedding of its own."""
    config = NATIVE3 | {"hidden_size": HIDDEN // 2, "target_hidden_size": HIDDEN, "norm_output": True}
    t = eagle3_tensors("midlayer", WORDS, hidden=HIDDEN // 2)
    t["embed_tokens.weight"] = drawn(VOCABULARY, HIDDEN // 2)
    return eagle3(config, t, "midlayer", (2, 4, 5), WORDS)


def peagle(config: dict[str, Any], mask: int, target: Any, *, count: int, first: str) -> Folder:
    """`count` layers; the mask's row of the embedding is its own."""
    normed = config.get("transformer_layer_config", {}).get("model_type") == "qwen3"
    t = eagle3_tensors(first, WORDS, head_norms=normed) | {"mask_hidden": drawn(1, 1, 3 * HIDDEN)}
    for number in range(1, count):
        norms = ("input_layernorm", "post_attention_layernorm")
        t |= layer_tensors(f"layers.{number}", HIDDEN, norms, head_norms=normed)
    trained = config.get("embed_requires_grad")
    table = drawn(VOCABULARY, HIDDEN) if trained else target.get_input_embeddings().weight.detach().clone()
    table[mask] = drawn(HIDDEN)
    t["embed_tokens.weight"] = table

    def run(fused: Tensor, embeds: Tensor) -> Tensor:
        out = pair_net(t, first, fused @ t["fc.weight"].T, embeds)
        for number in range(1, count):
            out = layer(t, f"layers.{number}", rms(out, t[f"layers.{number}.input_layernorm.weight"]), out)
        return spread_out(rms(out, t["norm.weight"]) @ t["lm_head.weight"].T, WORDS)

    def logits(text: Text) -> list[Tensor]:
        fused, embeds = text.fused(2, 4, 5)[:-1], (table if trained else text.table)[text.tokens[1:]]
        behind = []
        for anchor in range(len(fused)):
            longer = (
                torch.cat((fused[: anchor + 1], t["mask_hidden"][0])),
                torch.cat((embeds[: anchor + 1], table[mask][None])),
            )
            behind.append(run(*longer)[-1])
        return [run(fused, embeds), torch.stack(behind)]

    return Folder("peagle", config, t, logits)


def peagle_specforge(target: Any) -> Folder:
    return peagle(NATIVE3 | {"num_hidden_layers": 3, "pard_token": 60}, 60, target, count=3, first="layers.0")


def peagle_speculators(target: Any) -> Folder:
    config = SPECULATORS3 | {"speculators_model_type": "peagle", "mask_token_id": 7}
    return peagle(config, 7, target, count=2, first="midlayer")


def peagle_qwen(target: Any) -> Folder:
    """With layers of Qwen3."""
    config = SPECULATORS3 | {"transformer_layer_config": LLAMA | {"model_type": "qwen3"}, "mask_token_id": 7}
    return peagle(config | {"speculators_model_type": "peagle"}, 7, target, count=2, first="layers.0")


def peagle_trained(target: Any) -> Folder:
    """speculators' default: all of the embedding is trained."""
    config = SPECULATORS3 | {"speculators_model_type": "peagle", "mask_token_id": 7, "embed_requires_grad": True}
    return peagle(config, 7, target, count=2, first="midlayer")


# ---- blocks -----------------------------------------------------------------------------------------


def block_tensors(states: int, count: int) -> Tensors:
    t = {
        "fc.weight": drawn(HIDDEN, states * HIDDEN),
        "norm.weight": norm_weight(),
        "hidden_norm.weight": norm_weight(),
    }
    for number in range(count):
        norms = ("input_layernorm", "post_attention_layernorm")
        t |= layer_tensors(f"layers.{number}", HIDDEN, norms, head_norms=True)
    return t


def mixed(t: Tensors, at: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """DFlash 2's convolutions around a sublayer, over one block; without their tensors the sublayer alone."""
    if f"{at}.base_kernel" not in t:
        return sublayer(x)
    base = t[f"{at}.base_kernel"]
    taps = base.shape[1]
    delta = (x @ t[f"{at}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)
    group = HIDDEN // delta.shape[-1]

    def conv(y: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(y)
        for tap in range(taps):
            before = F.pad(y, (0, 0, tap, 0))[: len(y)]
            out = out + (base[side, tap] + delta[:, side, tap].repeat_interleave(group, -1)) * before
        return out

    return conv(sublayer(conv(x, 0)), 1)


def block(
    t: Tensors,
    states: tuple[int, ...],
    text: Text,
    anchor: int,
    mask: Tensor,
    size: int,
    causal: bool,
    windows: tuple[int | None, ...] = (),
) -> Tensor:
    """What the target's head reads of each slot of a block, [size, H].

    `windows`: of each layer how far back a slot sees, its own place included; such layers are causal inside.
    """
    context = rms(text.fused(*states)[:anchor] @ t["fc.weight"].T, t["hidden_norm.weight"])
    x = torch.cat((text.table[text.tokens[anchor]][None], mask.expand(size - 1, -1)))
    positions, of_slots = torch.arange(anchor), torch.arange(anchor, anchor + size)
    everywhere = torch.cat((positions, of_slots))
    inside = torch.ones(size, size, dtype=torch.bool)
    whole = torch.cat((torch.ones(size, anchor, dtype=torch.bool), inside.tril() if causal else inside), 1)
    near = torch.tensor([[(place <= slot) for place in everywhere] for slot in of_slots])
    for number in range(sum(name.endswith("q_proj.weight") for name in t)):
        at = f"layers.{number}"
        a, window = f"{at}.self_attn.", windows[number] if windows else None
        seen = whole if window is None else near & (everywhere[None] > of_slots[:, None] - window)

        def attention(y: Tensor, a: str = a, seen: Tensor = seen) -> Tensor:
            both = torch.cat((context, y))
            query = turn(heads(y, t[f"{a}q_proj.weight"], HEADS, t[f"{a}q_norm.weight"]), of_slots, 1e4)
            key = turn(heads(both, t[f"{a}k_proj.weight"], KV, t[f"{a}k_norm.weight"]), everywhere, 1e4)
            value = heads(both, t[f"{a}v_proj.weight"], KV)
            return attend(query, key, value, seen) @ t[f"{a}o_proj.weight"].T

        def forward(y: Tensor, at: str = at) -> Tensor:
            return feed_forward(t, at, y)

        x = x + mixed(t, f"{at}.attention_conv", rms(x, t[f"{at}.input_layernorm.weight"]), attention)
        x = x + mixed(t, f"{at}.mlp_conv", rms(x, t[f"{at}.post_attention_layernorm.weight"]), forward)
    return rms(x, t["norm.weight"])


def block_folder(
    family: str,
    config: dict[str, Any],
    t: Tensors,
    states: tuple[int, ...],
    mask: Tensor,
    *,
    first: int,
    size: int = 4,
    causal: bool = False,
    windows: tuple[int | None, ...] = (),
    behind: Callable[[Tensor, Tensor, int], Tensor] | None = None,
) -> Folder:
    """`first`: the slot that drafts first; `behind` makes logits of a slot, its product, and the token in front."""

    def logits(text: Text) -> list[Tensor]:
        S, depths = len(text.tokens), []
        outs = [block(t, states, text, anchor, mask, size, causal, windows)[first:] for anchor in range(1, S - 1)]
        for d in range(size - first):
            rows = []
            for anchor, out in enumerate(outs, 1):
                if anchor + 1 + d < S:
                    product = out[d] @ text.head.T
                    rows.append(product if behind is None else behind(out[d], product, text.tokens[anchor + d]))
            depths.append(torch.stack(rows))
        return depths

    return Folder(family, config, t, logits)


QWEN = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 2, "num_target_layers": LAYERS, "block_size": 4}


def dflash(target: Any) -> Folder:
    """z-lab's: the mask is a row of the target's embedding."""
    words = {"mask_token_id": 60, "target_layer_ids": [1, 4, 6]}
    config = QWEN | {"architectures": ["DFlashDraftModel"], "auto_map": {"": ""}, "dflash_config": words}
    mask = target.get_input_embeddings().weight.detach()[60]
    return block_folder("dflash", config, block_tensors(3, 2), (2, 5, 7), mask, first=1)


def dflash_windows(target: Any) -> Folder:
    """z-lab's later ones: the first layer sees the last five positions, and a block is causal in it alone."""
    words = {"mask_token_id": 60, "target_layer_ids": [1, 4, 6]}
    own = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    config = QWEN | own | {"architectures": ["DFlashDraftModel"], "dflash_config": words}
    mask = target.get_input_embeddings().weight.detach()[60]
    return block_folder("dflash", config, block_tensors(3, 2), (2, 5, 7), mask, first=1, windows=(5, None))


def dflash_speculators(target: Any) -> Folder:
    """States by their number, the mask a row of a table of its own, head and map inside."""
    config = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 5],
        "mask_token_id": 9,
        "block_size": 4,
        "is_causal": True,
        "transformer_layer_config": QWEN,
    }
    t = block_tensors(2, 1)
    table = target.get_input_embeddings().weight.detach().clone()
    table[9] = drawn(HIDDEN)
    made = block_folder("dflash", config, t, (2, 5), table[9], first=1, causal=True)
    head = target.get_output_embeddings().weight.detach().clone()
    made.tensors = t | {"embed_tokens.weight": table, "lm_head.weight": head, "d2t": offsets(list(range(VOCABULARY)))}
    return made


def dspark(target: Any) -> Folder:
    """DeepSpec's: words on top; its confidence does not look at the token in front."""
    words = {"mask_token_id": 60, "target_layer_ids": [1, 4], "markov_rank": 6, "markov_head_type": "vanilla"}
    own = {"enable_confidence_head": True, "confidence_head_with_markov": False, "architectures": ["Qwen3DSparkModel"]}
    t = block_tensors(2, 2)
    t |= {"markov_head.markov_w1.weight": drawn(VOCABULARY, 6), "markov_head.markov_w2.weight": drawn(VOCABULARY, 6)}
    t |= {"confidence_head.proj.weight": drawn(1, HIDDEN), "confidence_head.proj.bias": drawn(1)}

    def behind(_out: Tensor, product: Tensor, token: int) -> Tensor:
        return product + t["markov_head.markov_w1.weight"][token] @ t["markov_head.markov_w2.weight"].T

    mask = target.get_input_embeddings().weight.detach()[60]
    made = block_folder("dspark", QWEN | words | own, t, (2, 5), mask, first=0, behind=behind)
    table, head = target.get_input_embeddings(), target.get_output_embeddings()
    made.tensors = t | {"embed_tokens.weight": table.weight.detach(), "lm_head.weight": head.weight.detach()}
    return made


def dflash2(target: Any) -> Folder:
    """z-lab's second: convolutions, and a choice among each slot's five likeliest."""
    words = {"mask_token_id": 60, "target_layer_ids": [1, 4], "selector_top_k": 5, "selector_rank": 6}
    config = QWEN | {"architectures": ["DFlash2DraftModel"], "dflash_config": words | {"conv_kernel_size": 2}}
    t = block_tensors(2, 2)
    for number in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            t[f"layers.{number}.{conv}.base_kernel"] = drawn(2, 2, HIDDEN)
            t[f"layers.{number}.{conv}.kernel_projection.weight"] = drawn(2 * 2 * (HIDDEN // 8), HIDDEN)
    at = "candidate_selector."
    t |= {f"{at}predecessor_codebook": drawn(VOCABULARY, 6), f"{at}successor_codebook": drawn(VOCABULARY, 6)}
    t[f"{at}hidden_projection.weight"] = drawn(6, HIDDEN)

    def behind(out: Tensor, product: Tensor, token: int) -> Tensor:
        best = product.topk(5)
        asked = t[f"{at}predecessor_codebook"][token] * (t[f"{at}hidden_projection.weight"] @ out)
        score = best.values + t[f"{at}successor_codebook"][best.indices] @ asked
        return torch.full_like(product, -math.inf).scatter(0, best.indices, score)

    mask = target.get_input_embeddings().weight.detach()[60]
    return block_folder("dflash2", config, t, (2, 5), mask, first=1, behind=behind)


# ---- heads, modules ---------------------------------------------------------------------------------


def medusa_logits(
    t: Tensors, names: Callable[[int, int], str], projection: Callable[[int], Tensor], layers: int
) -> Any:
    def logits(text: Text) -> list[Tensor]:
        made = []
        for k in range(3):
            x = text.states[-1][: -(k + 2)]
            for number in range(layers):
                name = names(k, number)
                x = x + F.silu(x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(HIDDEN)))
            made.append(x @ projection(k).T)
        return made

    return logits


def medusa(_target: Any) -> Folder:
    """FasterDecoding's: its config counts two heads, and there are three, of two layers."""
    t: Tensors = {}
    for k in range(3):
        for number in range(2):
            t[f"{k}.{number}.linear.weight"], t[f"{k}.{number}.linear.bias"] = drawn(HIDDEN, HIDDEN), drawn(HIDDEN)
        t[f"{k}.2.weight"] = drawn(VOCABULARY, HIDDEN)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/target"}
    logits = medusa_logits(t, "{}.{}.linear".format, lambda k: t[f"{k}.2.weight"], 2)
    return Folder("medusa", config, t, logits)


def medusa_vllm(_target: Any) -> Folder:
    """vLLM's: names of its own, no biases, and some tokens alone by their ids."""
    t: Tensors = {"token_map": torch.tensor(WORDS)}
    for k in range(3):
        t[f"blocks.{k}.layers.0.weight"] = drawn(HIDDEN, HIDDEN)
        t[f"lm_heads.{k}.weight"] = drawn(len(WORDS), HIDDEN)
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "num_heads": 3}
    config |= {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "truncated_vocab_size": len(WORDS)}
    narrow = medusa_logits(t, "blocks.{}.layers.{}".format, lambda k: t[f"lm_heads.{k}.weight"], 1)
    return Folder("medusa", config, t, lambda text: [spread_out(each, WORDS) for each in narrow(text)])


def hydra(target: Any, *, prefix: bool = False) -> Folder:
    """The authors': three heads of three blocks, of which a head has the last twice; with places for dropout between
    them where a layer of the target's sizes stands in front."""
    step, at = (2, "prefix_embeding_layer") if prefix else (1, "")
    t: Tensors = {"input_embed_fn.weight": target.get_input_embeddings().weight.detach().clone()}
    for k in range(3):
        first, width = f"hydra_mlp.{k}.{step - 1}", (k + 2) * HIDDEN
        for part in ("linear", "res_connection"):
            t |= {f"{first}.{part}.weight": drawn(HIDDEN, width), f"{first}.{part}.bias": drawn(HIDDEN)}
        weight, bias = drawn(HIDDEN, HIDDEN), drawn(HIDDEN)
        for number in (1, 2):
            name = f"hydra_mlp.{k}.{step * (number + 1) - 1}.linear"
            t |= {f"{name}.weight": weight, f"{name}.bias": bias}
        head = f"hydra_lm_head.{k}" + ".1" * prefix
        t |= {f"{head}.weight": drawn(VOCABULARY, HIDDEN), f"{head}.bias": drawn(VOCABULARY)}
    if prefix:
        norms = ("input_layernorm", "post_attention_layernorm")
        t |= layer_tensors(f"{at}.layers.0", HIDDEN, norms, inner=target.config.intermediate_size)
        t |= {f"{at}.norm.weight": norm_weight(), f"{at}.embed_tokens.weight": drawn(VOCABULARY, HIDDEN)}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def logits(text: Text) -> list[Tensor]:
        x, embeds, made = text.states[-1], text.table[text.tokens], []
        if prefix:
            x = layer(t, f"{at}.layers.0", rms(x, t[f"{at}.layers.0.input_layernorm.weight"]), x)
            x = rms(x, t[f"{at}.norm.weight"])
        for k in range(3):
            X = len(x) - (k + 2)
            read = torch.cat([x[:X], *(embeds[ahead : ahead + X] for ahead in range(1, k + 2))], -1)
            first = f"hydra_mlp.{k}.{step - 1}"
            out = linear(f"{first}.res_connection", read) + F.silu(linear(f"{first}.linear", read))
            for number in (1, 2):
                out = out + F.silu(linear(f"hydra_mlp.{k}.{step * (number + 1) - 1}.linear", out))
            made.append(linear(f"hydra_lm_head.{k}" + ".1" * prefix, out))
        return made

    config = {"hydra_num_heads": 3, "hydra_num_layers": 3, "hydra_head_arch": "prefix-mlp" if prefix else "mlp"}
    config |= {"grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": "org/target"}
    return Folder("hydra++" if prefix else "hydra", config, t, logits)


def hydra_plus(target: Any) -> Folder:
    return hydra(target, prefix=True)


def mtp(config: dict[str, Any], at: str, names: tuple[str, ...], target: Any, *, mimo: bool = False) -> Folder:
    """A module; `names`: of the projection, the norms of token and state, and the last one. `mimo`: a layer of Qwen2, with
    the state in front of the token, of which there is none at position 0."""
    inner, norms = target.config.intermediate_size, ("input_layernorm", "post_attention_layernorm")
    layer_at = at if at == "mtp_layers.0" else f"{at}.layers.0"
    t = layer_tensors(layer_at, HIDDEN, norms, head_norms=not mimo, inner=inner)
    if mimo:
        widths = {"q": HEADS * SIZE, "k": KV * SIZE, "v": KV * SIZE}
        t |= {f"{layer_at}.self_attn.{name}_proj.bias": drawn(width) for name, width in widths.items()}
    fc, token_norm, state_norm, last = (f"{at}.{name}.weight" for name in names)
    t |= {name: norm_weight() for name in (token_norm, state_norm, last)} | {fc: drawn(HIDDEN, 2 * HIDDEN)}

    def logits(text: Text) -> list[Tensor]:
        embeds = text.table[text.tokens[1:]].clone()
        if mimo:
            embeds[0] = 0
        pair = [rms(embeds, t[token_norm]), rms(text.states[-1][:-1], t[state_norm])]
        read = torch.cat(pair[::-1] if mimo else pair, -1) @ t[fc].T
        out = layer(t, layer_at, rms(read, t[f"{layer_at}.input_layernorm.weight"]), read)
        return [rms(out, t[last]) @ text.head.T]

    return Folder("mtp", config, t, logits)


def mtp_speculators(target: Any) -> Folder:
    """speculators' module."""
    own = QWEN | {"intermediate_size": target.config.intermediate_size}
    names = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    config = {"speculators_model_type": "mtp", "transformer_layer_config": own}
    return mtp(config, "mtp_layers.0", names, target)


def mtp_mimo(target: Any) -> Folder:
    """In the words and names of MiMo's class."""
    config = LLAMA | {"model_type": "qwen2", "num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]}
    config |= {"intermediate_size": target.config.intermediate_size}
    names = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    made = mtp(config, "mtp_layers.0", names, target, mimo=True)
    made.tensors = {f"model.{name}": tensor for name, tensor in made.tensors.items()}
    return made


def mtp_exaone(target: Any) -> Folder:
    """In the words and names of EXAONE-MoE's class."""
    config = LLAMA | {"model_type": "exaone_moe", "num_nextn_predict_layers": 1}
    config |= {"intermediate_size": target.config.intermediate_size}
    return mtp(config, "mtp", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), target)


FORMS: dict[str, Callable[[Any], Folder]] = {
    "EAGLE-1, with a bias": eagle1,
    "EAGLE-3, SpecForge": eagle3_specforge,
    "EAGLE-3, the target's head": eagle3_whole,
    "EAGLE-3, ids in place of offsets": eagle3_angelslim,
    "EAGLE-3, speculators": eagle3_redhat,
    "EAGLE-3.1, speculators": eagle31,
    "EAGLE-3, norms of states alone": eagle3_states_normed,
    "EAGLE-3, a norm of what is fed back alone": eagle3_output_normed,
    "EAGLE-3, a layer of Qwen3": eagle3_qwen,
    "EAGLE-3, narrower than its target": eagle3_narrow,
    "P-EAGLE, native": peagle_specforge,
    "P-EAGLE, speculators": peagle_speculators,
    "P-EAGLE, layers of Qwen3": peagle_qwen,
    "P-EAGLE, an embedding of its own": peagle_trained,
    "DFlash, z-lab": dflash,
    "DFlash, windows": dflash_windows,
    "DFlash, speculators": dflash_speculators,
    "DSpark, DeepSpec": dspark,
    "DFlash 2, z-lab": dflash2,
    "Medusa, FasterDecoding": medusa,
    "Medusa, vLLM": medusa_vllm,
    "Hydra, its authors": hydra,
    "Hydra++, its authors": hydra_plus,
    "MTP, speculators": mtp_speculators,
    "MTP, MiMo": mtp_mimo,
    "MTP, EXAONE-MoE": mtp_exaone,
}
