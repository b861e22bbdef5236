"""Recipe sections that every method reads. No torch here.

Read next: `method_config.py`, the sections of single methods.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..config import Section

Decay = Annotated[float, Field(ge=0, lt=1)]

MASKED = 2048
"""Tokens of a row up to which it is read by one pass with a mask, and not document by document."""


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
    quantization: Literal["int8", "int4"] | None = None
    """Round the weights of the target's linear layers to 8 or 4 bits when it is loaded, by torchao; its
    embedding and output projection stay as they are. A checkpoint that is quantised already says so
    itself."""
    unquantised: str | None = None
    """The checkpoint that `path` was quantised from, folder or hub name, at its default branch: `eval` then states how
    far the quantised target is from it. For checkpoints that are quantised already."""
    sharding: Literal["none", "fully_shard"] = "none"
    """`fully_shard` cuts the weights of a frozen target's layers over all processes: each holds its
    share, and gathers one layer at a time while its rows go through. Held-out rows choose the best
    drafter then, as no process can decode with a share."""
    offload: bool = False
    """With `sharding`: keep the share in the host's memory; a layer is on the device while rows go through."""
    tensor_parallel: int = Field(1, ge=1, le=1_024)
    """Processes that hold one frozen target together (tensor parallelism): neighbours by rank, each with its part
    of every product of a layer. They decode with it together too, so probes stay."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave off unless you have read it."""

    @property
    def is_shared(self) -> bool:
        """Whether no process of several holds all of it."""
        return self.sharding != "none" or self.tensor_parallel > 1

    @property
    def cut_as(self) -> str:
        """The value that says so, for messages."""
        if self.tensor_parallel > 1:
            return f"target.tensor_parallel is {self.tensor_parallel}"
        return f"target.sharding is {self.sharding}"

    @model_validator(mode="after")
    def _rounded_once(self) -> Self:
        if self.unquantised is not None and self.quantization is not None:
            raise ValueError(
                f"quantization is {self.quantization}, so path names the unquantised model itself: leave out "
                "unquantised, which is for checkpoints that are quantised already"
            )
        return self

    @model_validator(mode="after")
    def _cut_in_one_way(self) -> Self:
        if self.offload and self.sharding == "none":
            raise ValueError("offload keeps the shares of a cut target on the host: set sharding to fully_shard")
        if self.sharding != "none" and self.tensor_parallel > 1:
            raise ValueError(
                f"sharding is {self.sharding} and tensor_parallel {self.tensor_parallel}: a target is cut in one of "
                "the two ways; leave one out"
            )
        return self


class FeaturesConfig(Section):
    """Where the hidden states of a frozen target come from."""

    source: Literal["online", "cache", "engine"] = "online"
    """`online` runs the target at every step; `cache` keeps its states on disk, which pays from
    the second epoch on; `engine` asks a serving engine for them, for targets that do not fit here."""
    server: str | None = None
    """URL of the engine."""
    served_model: str | None = None
    """Name that the engine knows the target by; default: `target.path`."""
    shared: str | None = None
    """Folder in which the engine leaves the states, its shared_storage_path, as it is seen here."""
    requests: int = Field(16, ge=1, le=1_000)
    """Documents that a process asks the engine for at a time."""
    timeout: float = Field(120.0, gt=0)
    """Seconds that the engine may take for one document."""
    answers: int | None = Field(None, ge=1, le=1_000_000)
    """Most tokens with which the engine's target answers each prompt of the rows anew, in the request that hands out
    its states; empty: the rows' own answers are learnt from."""
    answer_temperature: float = Field(0.0, ge=0, le=100)
    """Temperature of these answers."""
    folder: str | None = None
    """Folder of the cache, for one set of rows; default: `features` in the run's folder."""
    dtype: Literal["fp32", "bf16", "fp8"] = "bf16"
    """What the cache stores; the rounded states are what is trained on, from the first epoch on."""
    max_gb: float = Field(100.0, gt=0)
    """Largest size of the cache in GB (10^9 bytes), over all processes; states of further rows are
    computed at every step."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Of the products in the target's forward passes here; empty: as its weights are loaded, `target.dtype`. On a CPU
    that multiplies bf16 the passes of a target in fp32 take half the time with it."""
    prefetch: bool = True
    """Fetch the next states while the drafter steps; changes no result."""


def chunk_of(chunk: int | None, vocabulary: int) -> int:
    """`objective.chunk`, or what it is by default: a power of two, as few as make 2^24 logits and at most 256."""
    return min(256, 1 << max((2**24 // vocabulary).bit_length() - 1, 0)) if chunk is None else chunk


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
    vocabulary: int | None = Field(None, ge=2)
    """Number of tokens that a draft of `distill` can draft, the most frequent labels; empty: all of them. Its matrices
    keep a row for every token; the projection's other rows are not trained, and not read here."""
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
    recompute: bool = False
    """Keep of each layer its input alone, and compute the layer again for its gradient: less memory for activations,
    the time of a second forward pass, and the same bits."""

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


class ObjectiveConfig(Section):
    """What is minimised: a weighted sum of terms, the same ones for every method.

    `trainers/losses/divergences.py` has their equations and sources. EAGLE, HASS, EAGLE-3 and P-EAGLE have terms of
    their own in `eagle`, `eagle3` and `peagle`; those given here are added to them.
    """

    kl: float | None = Field(None, ge=0)
    """Weight of the forward KL divergence from the target's distribution p to the draft's q; empty: 1, and
    0 for `eagle`, `eagle3` and `peagle`."""
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
    would; the mass that is lost is reported as `cut_mass`. Not for `eagle`, `eagle3` and `peagle`, which
    have terms of their own."""
    from_kl_share: float | None = Field(None, ge=0, le=1)
    """Share of the steps in which the weights move linearly from forward KL alone to those above;
    empty: 0.3 with `tv` and neither `kl` nor `ce`, else 0. For `distill` and `boost`."""
    positions: Literal["geometric", "d-pace", "accepted", "on-policy"] = "geometric"
    """Weights of the drafts behind one place of the text: `geometric` lets each count `decay` times the one before it,
    by the method's section; `d-pace` follows how likely the text's own tokens are to be accepted so far; `accepted`
    is what a draft adds to the expected accepted length by the target's distributions: with `tv` alone that length is
    the objective. `on-policy` counts a draft as often as decoding's own drafts get there, of rows that the target has
    written at temperature 1: with `tv` alone the accepted length of the drafter's own drafts is the objective."""
    siblings: int = Field(1, ge=1, le=1_000)
    """How many tokens are drafted for a place, as the children of a node in a tree: for `tv`, `lk_alpha`, `lk_lambda`
    and `positions` the text goes on where one of so many draws is kept. 1: a chain. Not for `on-policy`."""
    pace_floor: float | None = Field(None, ge=0, le=1)
    """The probability with which a token counts for these weights that the draft gives none, so that far positions
    learn from the first step; empty: 0.5 for `d-pace`, else 0."""
    draft_length: int = Field(4, ge=1, le=64)
    """How many tokens an independent draft model drafts at a time, where `positions` goes by how far drafts get: each
    token of the text is then the first of a draft, the second of the one before it, and so on."""
    chunk: int | None = Field(None, ge=1)
    """Positions whose full-vocabulary logits exist at the same time; less memory when small. Empty: 256, and fewer
    where the vocabulary has more than 65,536 tokens (64 of 262,144)."""

    @model_validator(mode="after")
    def _its_own_drafts_are_chains(self) -> Self:
        if self.siblings > 1 and self.positions == "on-policy":
            raise ValueError(
                f"siblings is {self.siblings} and positions is on-policy, whose weights are those of chains; "
                "set siblings to 1, or positions to accepted"
            )
        return self


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
    """Share of the steps in which `wsd` decays; before that point a run can be given more steps (`loop.steps`), and
    goes on as one that was planned so long."""
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
    context_parallel: int = Field(1, ge=1, le=1_024)
    """Processes that share each row, every one with a part of its positions: the memory that training keeps of a
    long row is divided by so many. For `eagle` (HASS too), `eagle3` and `mtp`."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Mixed precision of forward and backward; weights and moments stay fp32. Unset: bf16 on a GPU, fp32 on a
    CPU, where rounding small matrices costs more than it saves."""
    compile: bool = False
    """What is trained and its loss through torch.compile, in the parts whose shapes stay the same from batch to batch.
    It needs a C++ compiler on a CPU, Triton on a GPU, and time wherever a shape is new; results differ from those
    without by rounding."""
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


class MachineConfig(Section):
    """The machine that a run is made for; `check` alone reads it, where it runs on another one."""

    processes: int | None = Field(None, ge=1)
    """Processes of the launch over all machines, one per device; empty: the machine at hand."""
    device_gb: float = Field(80.0, gt=0)
    """Memory of each device in GB (10^9 bytes)."""
    sharding: Literal["none", "zero2", "zero3"] = "zero2"
    """What the launch configuration spreads over the processes: none is `ddp.yaml`. Of one process none by default."""
