"""Recipe sections of single training methods. No torch here.

Read next: `methods.py`, which says whose each is; `config.py`, what every method reads.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..config import DIVIDES, Section


class LoraConfig(Section):
    """An adapter on an existing draft: a low-rank change of its weights, for one domain for example."""

    rank: int | None = Field(None, ge=1, le=65_536)
    """Rank of each layer's change; empty trains the whole draft. Needs `model.start_from`."""
    alpha: float = Field(16.0, gt=0)
    """A layer's change is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the inputs of a layer's change, in training."""
    layers: list[str] = []
    """Names of the layers that get a change, such as q_proj; empty: every linear layer."""
    name: str = Field("domain", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Name of the adapter; `drafter.adapter` selects it."""


class RolloutsConfig(Section):
    """Rows that the models continue themselves during training, in place of the data's; for `distill`, for a `target`
    that is to leave its loops, and for drafters that read the target's hidden states, which draft behind places of a
    row."""

    share: float = Field(0.0, ge=0, le=1)
    """Share of a step's rows whose labels are generated, or that are drafted for; 0 trains on the data alone."""
    places: int = Field(64, ge=1)
    """For drafters of hidden states: places of a row behind which they draft with their own tokens; the row's other
    tokens are context alone."""
    by: Literal["student", "target", "mixed"] = "student"
    """What generates: the draft as it is now (on-policy), the target, or either, token by token."""
    student_tokens: float = Field(0.5, ge=0, le=1)
    """For `mixed`: probability that a token is the draft's."""
    prompt_tokens: int = Field(32, ge=1)
    """Most tokens of the data's row that a continuation is conditioned on. In a chat that is all
    from its beginning: rows with no answer that begins within them stay as they are."""
    new_tokens: int = Field(32, ge=1)
    """Tokens of a continuation; a row holds as many prompts and continuations as fit."""
    temperature: Annotated[float, Field(ge=0), DIVIDES] = 1.0
    """Sampling temperature of continuations and own drafts; 0 takes the likeliest token."""
    every_steps: int = Field(1, ge=1)
    """Steps that train on the same continuations before new ones are generated: cheaper when
    large, closer to the current draft when small."""
    unlikelihood: float = Field(0.0, ge=0)
    """For `target`: weight of -log(1 - q(token)) on each token of a continuation that stands in a loop
    (unlikelihood, Welleck et al. 2020); the rest of a continuation does not count."""


class BoostConfig(Section):
    """Several small models (SSMs), each trained on what the earlier ones do not predict."""

    members: int = Field(3, ge=1, le=256)
    """Largest number of SSMs; each is trained for `loop.steps`."""
    samples: int = Field(4096, ge=1)
    """Prompts from the training rows that the target continues."""
    held_out: int = Field(256, ge=1)
    """Prompts from held-out rows, on which coverage is reported."""
    prompt_tokens: int = Field(64, ge=1)
    """Tokens of a prompt cut from text; of chats, the longest prompt that is used."""
    continuation: int = Field(64, ge=1)
    """Most tokens of the target's continuation of a prompt."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the target's continuations."""
    continuations: str | None = None
    """Folder of the continuations, to share them among runs; default: one in the run's folder."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the choice of prompts, and of sampling at a temperature."""
    unit: Literal["sample", "span"] = "span"
    """What is covered or not: a whole `sample`, or the `span` that begins at each token."""
    match_tokens: int = Field(2, ge=0)
    """A unit is covered when this many tokens from its beginning are predicted; 0: all that follow,
    with `sample` the whole continuation, as in SpecInfer."""
    weights: Literal["hard", "soft", "none"] = "soft"
    """Covered units are left out (`hard`), count less (`soft`), or as before (`none`: SSMs that
    differ only by their seeds, as a control)."""
    soft: float = Field(2.0, gt=0)
    """For `soft`: a unit's weight is multiplied by exp(-soft * a), a = the fraction of it that the
    earlier SSM predicts."""
    stop_share: float = Field(0.05, ge=0, lt=1)
    """No further SSM is trained when less than this share is uncovered."""
    order: Literal["in_turn", "side_by_side"] = "in_turn"
    """`side_by_side` trains all SSMs in the same steps, each weighted by what the earlier ones cover
    at that moment; as many steps, and the memory of all together."""
    start_from: list[str] = []
    """Initial weights of each SSM, in order: a folder or hub name, or `ssm-1` for the run's own first
    SSM; an empty or missing entry uses `model.start_from`."""
    layers: list[Annotated[int, Field(ge=1, le=1_000)] | None] = []
    """Layers of each SSM that is made from scratch or cut from the target, in order; a null or
    missing entry uses `model.layers`, and an SSM initialised from another keeps its own."""


class MedusaConfig(Section):
    """The heads of a Medusa or Hydra drafter, and the weight of each in the loss."""

    heads: int = Field(4, ge=1, le=64)
    """Number of heads; head k proposes the token k positions after the next one."""
    layers: int = Field(1, ge=1, le=64)
    """Residual blocks of a head."""
    decay: float = Field(0.8, gt=0, le=1)
    """Each head counts so many times what the one before it counts, the first itself: head k decay^k. Far tokens are
    hard, and rarely reached."""
    shared_head: bool = False
    """All heads share the target's own output projection: less memory, less accurate."""
    prefix: bool = False
    """Hydra++: a decoder layer over the target's states in front of the heads; for `hydra` only."""
    as_published: bool = False
    """Hydra's heads with what its authors' code has beside: a linear map in place of the identity that passes states
    on, biases of the projections, and a norm behind the prefix layer. For going on from published heads, and for
    exports to that code; for `hydra` only."""
    vocabulary: int | None = Field(None, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's, and empty: all of them."""
    recompute: bool = False
    """Keep nothing of a head but the states that all heads read, and compute it again for its gradient: less memory,
    the same bits. It pays where heads are deep (`layers`) or read the tokens in front, as Hydra's."""


class TuneConfig(Section):
    """How the target itself is trained, in methods that train it together with its drafter."""

    how: Literal["lora", "full"] = "lora"
    """`lora` trains low-rank changes to linear layers, `full` every weight of the target."""
    rank: int = Field(32, ge=1, le=65_536)
    """Rank of each layer's change."""
    alpha: float = Field(16.0, gt=0)
    """A layer's change is scaled by alpha / rank."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the inputs of a layer's change, in training."""
    layers: list[str] = []
    """Names of the layers that get a change, such as q_proj; empty: every linear layer."""
    head_lr_ratio: float = Field(4.0, gt=0)
    """The drafter's learning rate is this many times the target's, which is optimizer.lr."""
    rest_steps: int = Field(0, ge=0)
    """First steps in which the target is frozen and the drafter trained alone."""
    recompute: bool = False
    """Keep of each layer of the target its input alone, and compute the layer again for its gradient: less memory for
    activations, the time of a second forward pass, and the same bits."""


class Medusa2Config(Section):
    """How the heads' loss is added to the target's own in Medusa-2."""

    weight: float = Field(0.2, gt=0)
    """Weight lambda_0 of the heads' loss beside the target's own."""
    sine_steps: int = Field(0, ge=0)
    """Steps after `tune.rest_steps` in which that weight grows from 0 along a sine; 0: at once."""
    self_distillation: bool = False
    """Hold the target to its own distribution before the run, by KL, in place of the text's tokens."""


class BpdConfig(Section):
    """The k-output layer of blockwise parallel decoding."""

    block: int = Field(5, ge=2, le=256)
    """Tokens k of a block, the target's own next token included: the most that one call can give."""
    inner: int | None = Field(None, ge=1, le=1_000_000)
    """Hidden units of the layer per output; default: the target's hidden size."""
    every_head: bool = False
    """Train all outputs at every step; without it one is drawn at random, at a k-th of the cost."""
    vocabulary: int | None = Field(None, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's, and empty: all of them."""
    backbone: Literal["frozen", "tuned"] = "frozen"
    """`tuned` trains the target too, as `tune` says; its own next token is one of the k."""


class EagleConfig(Section):
    """How EAGLE-1 and EAGLE-2 drafters are trained."""

    feature: float = Field(1.0, ge=0)
    """Weight of the SmoothL1 distance between predicted and true features."""
    ce: float = Field(0.1, ge=0)
    """Weight of the cross-entropy between the distributions that follow from them."""
    noise: float = Field(0.1, ge=0)
    """Uniform noise of at most this size is added to features in training; 0: none."""
    passes: int = Field(1, ge=1, le=256)
    """Passes over its own features in training: 1 is EAGLE-1, 3 is HASS; each costs as much as the
    first."""
    top_k: float = Field(0.0, ge=0)
    """Weight of HASS's cross-entropy on the target's likeliest tokens only."""
    top_k_tokens: int = Field(10, ge=1)
    """Number of tokens that `top_k` compares."""
    decay: float = Field(1.0, gt=0, le=1)
    """Each pass counts so many times what the one before it counts, the first 1; 1 as in HASS."""
    vocabulary: int | None = Field(None, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's, and empty: all of them."""
    recompute: bool = False
    """Keep of each pass its output, keys and values alone, and compute it again for its gradient: a third of the
    memory, a fifth more time, and the same bits."""


class Eagle3Config(Section):
    """How EAGLE-3 drafters are trained."""

    passes: int = Field(7, ge=1, le=256)
    """Passes over its own outputs in training: as many as tokens will be drafted; each costs as much
    as the first."""
    ce: float = Field(1.0, ge=0)
    """Weight of the soft cross-entropy on the draft vocabulary, the paper's own loss."""
    decay: float = Field(0.8, gt=0, le=1)
    """Each pass counts so many times what the one before it counts, the first 1."""
    recompute: bool = False
    """Keep of each pass its output, keys and values alone, and compute it again for its gradient: a third of the
    memory, a fifth more time, and the same bits."""
    vocabulary: int = Field(32000, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's."""
    layers: tuple[int, int, int] | None = None
    """Hidden states that are fused (0: the embedding); default: 2, half, and the third last."""
    feature_norms: bool = False
    """EAGLE-3.1: a norm on each fused state, and outputs are fed back after the last norm; steadier
    in long chains and long contexts. llama.cpp cannot serve it."""


class MtpConfig(Section):
    """How MTP modules are trained: one module, applied to its own states."""

    passes: int = Field(3, ge=1, le=256)
    """Applications in training: as many as tokens will be drafted; each costs as much as the first."""
    decay: float = Field(0.6, gt=0, le=1)
    """Each application counts so many times what the one before it counts (FastMTP's beta); together they count 1."""
    vocabulary: int | None = Field(None, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's, and empty: all of them."""
    state: Literal["behind", "before"] = "behind"
    """Where the target's states are taken and the module's own are fed back: behind the last norm, as engines do, or
    before it."""
    from_target: bool = False
    """Begin with the MTP module in the target's own checkpoint, with its sizes; else a fresh one. With
    `model.start_from` the sizes alone are the checkpoint's."""
    recompute: bool = False
    """Keep of each pass its output, keys and values alone, and compute it again for its gradient: a third of the
    memory, a fifth more time, and the same bits."""


class PeagleConfig(Section):
    """How P-EAGLE drafters are trained: all depths in one pass."""

    depths: int = Field(8, ge=2, le=256)
    """Drafts of a pass that are trained: as many as tokens will be drafted."""
    kept: float = Field(0.7, gt=0, le=1)
    """Of the positions with a label, depth d (from 0 on) trains the share kept^d."""
    kept_least: float = Field(0.2, ge=0, le=1)
    """The least share that a depth trains."""
    decoder_layers: int = Field(4, ge=1, le=1_000)
    """Layers of the drafter, of the target's sizes; the first reads state and embedding side by side."""
    ce: float = Field(1.0, ge=0)
    """Weight of the soft cross-entropy on the draft vocabulary."""
    decay: float = Field(1.0, gt=0, le=1)
    """Each depth counts so many times what the one before it counts, the first 1; 1 as published."""
    vocabulary: int = Field(32000, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's."""
    layers: tuple[int, int, int] | None = None
    """Hidden states that are fused (0: the embedding); default: 2, half, and the third last."""
    recompute: bool = False
    """Keep of each layer its input alone, and compute the layer again for its gradient, with its mask: less memory,
    the time of a second forward pass, and the same bits."""


class PardConfig(Section):
    """How PARD drafts are trained: an ordinary draft model that drafts all its tokens in one pass."""

    drafts: int = Field(8, ge=1, le=256)
    """Drafts of a pass that are trained: as many as tokens will be drafted. 1 is an ordinary draft model."""
    kept: float = Field(0.7, gt=0, le=1)
    """Of the positions with a label, masks at depth d (from 1 on) train the share kept^d."""
    kept_least: float = Field(0.2, ge=0, le=1)
    """The least share that a depth trains."""
    mask_token: int | None = Field(None, ge=0)
    """The id that stands for tokens not chosen yet, which no text may have; empty: the first row of the draft's
    embedding that is no token of the tokenizer, else the padding token, else one more row, which vLLM refuses."""


class BlockConfig(Section):
    """How block drafters are trained (`dflash`, `dspark`, `dflash2`): every pass drafts a block of tokens at once."""

    size: int = Field(8, ge=2, le=256)
    """Slots of a block. With `fill-in` it drafts one token less, with `anchor-first` as many."""
    layout: Literal["fill-in", "anchor-first"] | None = None
    """`fill-in` is DFlash's: a slot speaks of its own token, and the first, which holds the last known one,
    of none. `anchor-first` is DSpark's: a slot speaks of the token behind it, so that the same pass drafts one
    more. Empty: the method's own."""
    causal: bool = False
    """Let a slot see the earlier ones of its block alone; off, all of them."""
    vocabulary: int | None = Field(None, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's, and empty: all of them."""
    decoder_layers: int = Field(5, ge=1, le=1_000)
    """Layers of the drafter, of the target's sizes."""
    layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Hidden states of the target that it reads (0: the embedding); default: five, from the second layer's
    to the last but two, or three of a small target."""
    anchors: int = Field(512, ge=1, le=1_000_000)
    """Blocks that are trained per row, begun at tokens drawn anew in every step; about a row's tokens
    divided by `size` covers every token once."""
    decay: float = Field(0.8, gt=0, le=1)
    """Each draft of a block counts so many times what the one before it counts, those of a row together as much as it
    has labels; see `objective.positions`."""
    weigh: Literal["labels", "blocks"] = "labels"
    """What counts alike: every label of the text, so that a row weighs as much as it has labels; or every block, as
    in DeepSpec, so that rows with as many blocks weigh alike. Under `blocks` the mean is over a micro-batch."""
    ce_label: Literal["text", "target"] = "text"
    """The label of `objective.ce`, and of the selector of `dflash2`: the text's own token, or the target's likeliest
    one, as in speculators."""
    mask_token: int | None = Field(None, ge=0)
    """An unused id whose embedding stands for what is not known yet; empty: the drafter learns a vector of
    its own."""
    recompute: bool = False
    """Keep of each layer the slots that it reads alone, and compute the layer again for its gradient, with its mask:
    less memory, the time of a second forward pass, and the same bits."""


class DSparkConfig(Section):
    """The head with which DSpark's drafts see the token in front of them (`dspark`), beside `block`."""

    rank: int = Field(256, ge=1)
    """Of the head's two matrices, vocabulary x rank each."""
    confidence: float = Field(0.0, ge=0)
    """Weight of the loss of a head that says how sure the drafter is of each slot, for `drafter.confidence`: the
    cross-entropy against the share of the draft's distribution that is accepted; 0: no such head."""


class DFlash2Config(Section):
    """The selector with which DFlash 2's drafts see the token in front of them, and the convolutions along its
    blocks (`dflash2`), beside `block`."""

    rank: int = Field(256, ge=1)
    """Of the selector's two tables, vocabulary x rank each."""
    candidates: int = Field(16, ge=2, le=4_096)
    """Likeliest tokens of a slot that it chooses among."""
    weight: float = Field(1.0, gt=0)
    """Of the selector's cross-entropy in the loss. A draft whose label is not among the candidates has none."""
    taps: int = Field(2, ge=1, le=16)
    """Slots that a convolution reads, its own included."""
    group: int = Field(16, ge=1)
    """Channels that share what a slot adds to a convolution's kernel; divides the hidden size."""
