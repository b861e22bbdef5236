"""Texts by one model, or by several token by token: what a draft is trained on besides data.

Plain decoding without a proposal: every model reads every token, and a random number chooses whose
distribution each row's next token is drawn from. Prompts of all lengths are prefilled in one call, which costs
the rows their independence of each other's rounding; `engine.autoregressive` keeps it, for what is
measured. Read next: `engine.py`; `trainers/teacher/rollouts.py`, which trains on what is written here.

Shapes: B rows, S tokens of the longest prompt, V vocabulary, M models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.on_host import is_host
from ...decoding.random import Uniforms
from ...decoding.rows import Rows
from ...decoding.sampling import Warper, draw
from ...decoding.tree.tree import chain


@torch.inference_mode()
def write(
    models: Sequence[Backbone],
    shares: Sequence[float],
    prompts: Sequence[Sequence[int]],
    *,
    warper: Warper,
    max_new_tokens: int,
    uniforms: Uniforms,
    eos_ids: Sequence[int] = (),
    vocabulary: int | None = None,
) -> list[list[int]]:
    """Continuations of `prompts`, each up to an id of `eos_ids`, which is its last token then.

    Args:
        models: with the same tokens by the same numbers; padding rows that one lacks are left out.
        shares: how likely each model is to write a token; they sum to 1.
        prompts: at least one token each.
        uniforms: two numbers per row and token with several models, else one.
        vocabulary: ids from here on, padding rows of the projection, are never drawn.

    Returns:
        At least one and at most `max_new_tokens` ids per prompt.
    """
    device = models[0].device
    lengths = [len(prompt) - 1 for prompt in prompts]
    sizes = [model.vocabulary for model in models]
    vocabulary = min(sizes if vocabulary is None else [*sizes, vocabulary])
    kv_caches = [_prefilled(model, prompts, max_new_tokens) for model in models]
    rows = Rows(lengths, max_new_tokens, eos_ids, device)
    rows.last_B.copy_(torch.tensor([prompt[-1] for prompt in prompts]))
    ends_B1 = torch.tensor(shares, dtype=torch.float64, device=device).cumsum(0)[:-1]
    one_B = torch.ones_like(rows.last_B)
    for _ in range(max_new_tokens):
        logits = [
            model.forward(rows.last_B[:, None], rows.lengths_B, chain(0), kv_cache)[:, 0]
            for model, kv_cache in zip(models, kv_caches, strict=True)
        ]
        logits_MBV = torch.stack([logits_BV[:, :vocabulary] for logits_BV in logits])
        random_BK = uniforms.take(1 if len(models) == 1 else 2)
        writer_B = (random_BK[:, -1:] >= ends_B1).sum(1)
        logits_BV = logits_MBV[writer_B, torch.arange(len(prompts), device=device)]
        if warper.greedy:
            token_B = logits_BV.argmax(-1)
        else:
            token_B = draw(warper(logits_BV), random_BK[:, 0])
        running_B = ~rows.done_B
        rows.lengths_B += running_B
        rows.emit(token_B[:, None], one_B * running_B)
        rows.last_B.copy_(torch.where(running_B, token_B, rows.last_B))
        # only where looking is free
        if is_host(device) and bool(rows.done_B.all()):
            break
    return rows.answers()


def _prefilled(model: Backbone, prompts: Sequence[Sequence[int]], room: int) -> KVCache:
    """A KV cache with all of every prompt but its last token, written in one call.

    Short prompts are filled up behind; that writes garbage behind a row's length. Recurrent layers
    would fold it into their state, so they are given row by row.
    """
    longest = max(map(len, prompts))
    static = model.device.type == "cuda"
    kv_cache = KVCache(len(prompts), longest + room, static=static)
    if longest == 1:
        return kv_cache
    if model.is_recurrent:
        for row, prompt in enumerate(prompts):
            if len(prompt) > 1:
                model.prefill_row(row, prompt[:-1], kv_cache)
        return kv_cache
    padded = [[*prompt[:-1], *[0] * (longest - len(prompt))] for prompt in prompts]
    tokens_BS = torch.tensor(padded, device=model.device)
    nothing_B: Tensor = torch.zeros(len(prompts), dtype=torch.long, device=model.device)
    model.forward(tokens_BS, nothing_B, chain(longest - 2), kv_cache, keep=1)
    return kv_cache
