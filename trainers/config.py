"""Recipe sections that the trainers read. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..config import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class TargetConfig(Section):
    """The frozen model that a drafter is made for."""

    path: str = "tiny"
    """Folder or hub name of a causal LM; `tiny` is the embedded default target."""
    sizes: str | None = None
    """A config.json with the target's sizes, or the name of a shipped one (recipes/assets/sizes):
    `check` then needs no hub, and no target on this machine."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the frozen target's weights."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave off unless you have read it."""


class FeaturesConfig(Section):
    """Where the hidden states of a frozen target come from."""

    source: Literal["online", "cache"] = "online"
    """`online` runs the target at every step; `cache` keeps its states on disk, which pays from
    the second epoch on."""
    folder: str | None = None
    """Folder of the cache, for one set of rows; default: `features` in the run's folder."""
    dtype: Literal["fp32", "bf16", "fp8"] = "bf16"
    """What the cache stores; the rounded states are what is trained on, from the first epoch on."""
    max_gb: float = Field(100.0, gt=0)
    """Largest size of the cache in GB (10^9 bytes), over all processes; states of further rows are
    computed at every step."""
    prefetch: bool = True
    """Fetch the next states while the drafter steps; changes no result."""


FROM_TARGET = "target"
"""The value of `model.start_from` that cuts the draft from the target."""


class ModelConfig(Section):
    """Architecture of a model made from scratch; unset sizes are derived from the target's. With
    `start_from: target` they say how much of the target is kept; unset ones keep all."""

    architecture: Literal["qwen3", "llama"] | None = None
    """Family of `transformers` classes; default: the target's own, or qwen3."""
    layers: int | None = Field(None, ge=1, le=1_000)
    """Decoder layers; derived: a quarter of the target's, at least one."""
    hidden: int | None = Field(None, ge=8, le=1_000_000)
    """Hidden size; derived: half of the target's, rounded to whole heads."""
    intermediate: int | None = Field(None, ge=8, le=10_000_000)
    """Inner size of the feed-forward part; derived: same ratio to `hidden` as in the target."""
    heads: int | None = Field(None, ge=1, le=100_000)
    """Attention heads; derived from `hidden` and `head_size`."""
    kv_heads: int | None = Field(None, ge=1, le=100_000)
    """Key-value heads; derived: the target's ratio."""
    head_size: int | None = Field(None, ge=4, le=100_000)
    """Size of a head; derived: the target's."""
    tied: bool = True
    """One matrix for the input embedding and the output projection; a draft cut from the target
    does as the target does."""
    max_positions: int | None = Field(None, ge=16, le=1_000_000_000)
    """Longest context in tokens; derived: the target's, or 2048."""
    start_from: str | None = None
    """Folder or hub name of a model whose weights initialise this one, in place of random weights;
    `target` cuts the draft from the target (a folder of that name is ./target), for `distill` and
    `boost`. Heads and feature drafters are initialised from a drafter folder of their own family,
    sizes and target; EAGLE-3 keeps that folder's draft vocabulary."""
    keep_layers: list[int] | None = None
    """With `start_from: target`: the target's layers to keep, counted from 0; null: layers are
    removed one by one, each time the one that costs least measured acceptance."""
    prune_rows: int = Field(16, ge=1)
    """With `start_from: target`: held-out rows on which acceptance and activations are measured."""
    deepen_to: int | None = Field(None, ge=2, le=1_000)
    """With `start_from`: layers that the model gets before it is trained on; its output is at first the same."""
    sizes: str | None = None
    """As `target.sizes`, for the model that `start_from` names."""

    @model_validator(mode="after")
    def _a_model_is_deepened(self) -> Self:
        if self.deepen_to is not None and self.start_from is None:
            raise ValueError("deepen_to adds layers to a trained model: set start_from, or layers for a fresh one")
        return self

    @model_validator(mode="after")
    def _layers_are_of_a_target(self) -> Self:
        if self.keep_layers is not None and self.start_from != FROM_TARGET:
            raise ValueError("keep_layers names layers of the target: set start_from: target")
        return self


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


class ObjectiveConfig(Section):
    """What is minimised: a weighted sum of terms, the same ones for every method.

    `trainers/losses/divergences.py` has their equations and sources. EAGLE, HASS and EAGLE-3 have terms of
    their own in `eagle` and `eagle3`; those given here are added to them.
    """

    kl: float | None = Field(None, ge=0)
    """Weight of the forward KL divergence from the target's distribution p to the draft's q; empty: 1, and
    0 for `eagle` and `eagle3`."""
    reverse_kl: float = Field(0.0, ge=0)
    """Weight of the KL from q to p: a small draft keeps to what the target is likely to say."""
    jsd: float = Field(0.0, ge=0)
    """Weight of the Jensen-Shannon divergence, which lies between the two and is bounded."""
    jsd_beta: float = Field(0.5, gt=0, lt=1)
    """Weight of p in the mixture of p and q that the Jensen-Shannon divergence compares with."""
    tv: float = Field(0.0, ge=0)
    """Weight of the total variation, 1 - acceptance. Its gradient is small for an untrained draft:
    begin with kl, see `from_kl_share`."""
    lk_alpha: float = Field(0.0, ge=0)
    """Weight of -log acceptance."""
    lk_lambda: float = Field(0.0, ge=0)
    """Weight of KL where acceptance is low and TV where it is high: w KL + (1 - w) TV."""
    lk_eta: float = Field(3.0, ge=0)
    """In `lk_lambda`, w = exp(-lk_eta * acceptance) at each position."""
    top_k: float = Field(0.0, ge=0)
    """Weight of the cross-entropy on the target's likeliest tokens only, as in HASS."""
    top_k_tokens: int = Field(10, ge=1)
    """Number of tokens that `top_k` compares."""
    ce: float = Field(0.0, ge=0)
    """Weight of the cross-entropy on the text's own next token."""
    temperature: float = Field(1.0, gt=0)
    """Softens both distributions inside every term but `ce`."""
    teacher_top_k: int | None = Field(None, ge=1)
    """Keep only this many of the target's likeliest tokens, renormalised, as a stored teacher
    would; the mass that is lost is reported as `cut_mass`. Not for `eagle` and `eagle3`, which have
    terms of their own."""
    from_kl_share: float | None = Field(None, ge=0, le=1)
    """Share of the steps in which the weights move linearly from forward KL alone to those above;
    empty: 0.3 with `tv` and neither `kl` nor `ce`, else 0. For `distill` and `boost`."""
    positions: Literal["geometric", "d-pace"] = "geometric"
    """Weights of the positions that heads or passes predict together: `geometric` is `decay`^j of
    the method's section; `d-pace` instead follows how likely the draft is to be accepted so far."""
    pace_floor: float = Field(0.5, gt=0, le=1)
    """For `d-pace`: the probability with which a token counts that the draft gives none, so that
    far positions learn from the first step."""
    chunk: int = Field(256, ge=1)
    """Positions whose full-vocabulary logits exist at the same time; less memory when small."""


class RolloutsConfig(Section):
    """Rows that the models continue themselves during training, in place of the data's; for
    `distill`."""

    share: float = Field(0.0, ge=0, le=1)
    """Share of a step's rows whose labels are generated; 0 trains on the data alone."""
    by: Literal["student", "target", "mixed"] = "student"
    """What generates: the draft as it is now (on-policy), the target, or either, token by token."""
    student_tokens: float = Field(0.5, ge=0, le=1)
    """For `mixed`: probability that a token is the draft's."""
    prompt_tokens: int = Field(32, ge=1)
    """Most tokens of the data's row that a continuation is conditioned on. In a chat that is all
    from its beginning: rows with no answer that begins within them stay as they are."""
    new_tokens: int = Field(32, ge=1)
    """Tokens of a continuation; a row holds as many prompts and continuations as fit."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of continuations; 0 takes the likeliest token."""
    every_steps: int = Field(1, ge=1)
    """Steps that train on the same continuations before new ones are generated: cheaper when
    large, closer to the current draft when small."""


class OptimizerConfig(Section):
    """Optimiser and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the update of hidden matrices (AdamW for the rest), and needs fewer
    tokens."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate; Muon's updates are scaled to the size of AdamW's."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's first and second moments."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay on matrices; vectors get none."""
    clip: float = Field(1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up; `wsd` is constant, then a linear decay."""
    decay_share: float = Field(0.25, gt=0, le=1)
    """Share of the steps in which `wsd` decays; a run can be lengthened before that point."""
    warmup_steps: int = Field(50, ge=0)
    """Steps of linear warm-up."""
    final_share: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step as a share of the peak."""


class LoopConfig(Section):
    """Length, batch, precision and reports of a run."""

    steps: int = Field(200, ge=1)
    """Optimiser steps."""
    batch_rows: int = Field(16, ge=1)
    """Rows of an optimiser step over all processes together."""
    micro_rows: int = Field(16, ge=1)
    """Rows of one forward pass in one process; accumulation follows from it."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Mixed precision of forward and backward; weights and moments stay fp32. Unset: bf16 on a GPU, fp32 on a
    CPU, where rounding small matrices costs more than it saves."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of weights, row order and dropout."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights; off when empty."""
    log_every: int = Field(10, ge=1)
    """Steps between progress lines and `metrics.jsonl` records."""
    validate_every: int = Field(100, ge=1)
    """Steps between measurements of the held-out loss."""
    validate_rows: int = Field(64, ge=1)
    """Held-out rows that the held-out loss is measured on."""
    max_bad_steps: int = Field(3, ge=0)
    """Most non-finite steps in a row: each is skipped, one more stops the run."""
    stall_seconds: int = Field(1800, ge=1)
    """Longest time that one process waits for another, after which it ends the run and names the one that does
    not answer. More than preparing the data takes, for which all wait for process 0."""
    trackers: list[Literal["tensorboard", "trackio", "wandb", "mlflow", "aim"]] = []
    """Trackers that get copies of the metrics."""

    def precision_on(self, *, cpu: bool) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of a run there."""
        return self.precision or ("fp32" if cpu else "bf16")

    deterministic: bool = True
    """Refuse kernels whose result depends on timing, so that a resume is exact."""


class CheckpointConfig(Section):
    """Resumable checkpoints: how often, and how many are kept."""

    every_steps: int = Field(100, ge=1)
    """Steps between resumable checkpoints; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints that are kept; older ones are deleted once the new one is complete."""


class ProbeConfig(Section):
    """Decoding of held-out prompts during training; the drafter with the best tau is exported."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between probes; empty probes at the last step only."""
    prompts: int = Field(8, ge=1)
    """Held-out prompts per probe."""
    max_new_tokens: int = Field(48, ge=2)
    """Tokens generated per prompt."""
    draft_length: int = Field(4, ge=1, le=1_000)
    """Drafted tokens per target call."""


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
    """Weight of pass j in the loss is decay^j; 1 as in HASS."""


class MedusaConfig(Section):
    """The heads of a Medusa or Hydra drafter, and the weight of each in the loss."""

    heads: int = Field(4, ge=1, le=64)
    """Number of heads; head k proposes the token k positions after the next one."""
    layers: int = Field(1, ge=1, le=64)
    """Residual blocks of a head."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of head k in the loss is decay^k: far tokens are hard, and rarely reached."""
    shared_head: bool = False
    """All heads share the target's own output projection: less memory, less accurate."""
    prefix: bool = False
    """Hydra++: a decoder layer over the target's states in front of the heads; for `hydra` only."""


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
    backbone: Literal["frozen", "tuned"] = "frozen"
    """`tuned` trains the target too, as `tune` says; its own next token is one of the k."""


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


class Eagle3Config(Section):
    """How EAGLE-3 drafters are trained."""

    passes: int = Field(7, ge=1, le=256)
    """Passes over its own outputs in training: as many as tokens will be drafted; each costs as much
    as the first."""
    ce: float = Field(1.0, ge=0)
    """Weight of the soft cross-entropy on the draft vocabulary, the paper's own loss."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of pass j in the loss is decay^j."""
    vocabulary: int = Field(32000, ge=2)
    """Number of tokens that can be drafted, the most frequent labels; at most the target's."""
    layers: tuple[int, int, int] | None = None
    """Hidden states that are fused (0: the embedding); default: 2, half, and the third last."""
    feature_norms: bool = False
    """EAGLE-3.1: a norm on each fused state, and outputs are fed back after the last norm; steadier
    in long chains and long contexts. llama.cpp cannot serve it."""
