"""The arguments of every command, as data, with the words of its `--help`: no behaviour, no torch.

Read next: `verbs.py`, the table of commands, which calls the workers with these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from ..drafters.families import formats, served, training_free, wrapping

_METHODS = (
    f"Method, or several with commas between. By a drafter: {', '.join(['trained', *wrapping()])}; "
    f"without one: {', '.join(training_free())}; by itself: skeleton-of-thought."
)
_COMPARED = f"Methods: around each drafter {', '.join(wrapping())}; without one {', '.join(training_free())}."
if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[tuple(formats())]


@dataclass
class LsRequest:
    """List the shipped recipes, the drafters that others published, or the sets of rows by name."""

    sources: bool = False
    """The sets that data.source and --source take by name, in place of recipes."""
    drafters: bool = False
    """The drafters on the hub that the shipped list knows, in place of recipes."""
    target: str | None = None
    """Of those, the ones for this target: its name on the hub, or its folder."""


@dataclass
class RecommendRequest:
    """Say by a target's config which recipe to copy, how large and long that is, and which drafters are published."""

    target: Positional[str]
    """Folder, GGUF file or hub name of the target, or `tiny`; no weights are read."""


@dataclass
class RecipeRequest:
    """A recipe."""

    recipe: Positional[str]
    """Name of a shipped recipe, or path of a file."""


@dataclass
class ShowRequest(RecipeRequest):
    """Print a recipe resolved, with where each value comes from."""


@dataclass
class CopyRequest:
    """Copy a shipped recipe to edit it."""

    recipe: Positional[str]
    """Name of a shipped recipe."""
    path: Positional[Path]
    """Where to write it."""


@dataclass
class CheckRequest(RecipeRequest):
    """Pre-flight: everything that can fail, before hours are spent."""

    out: Path | None = None
    """Folder that the run will have; default runs/NAME."""


@dataclass
class TrainRequest(RecipeRequest):
    """Train from a recipe."""

    out: Path | None = None
    """Folder of the run; default runs/NAME."""
    resume: str = "auto"
    """auto (go on if there is a checkpoint), never, or the path of a checkpoint."""


@dataclass
class InspectRequest(RecipeRequest):
    """Print rows as input token -> label token, in or out of the loss."""

    rows: int = 2
    """How many rows."""


@dataclass
class RunPair:
    """A target and a drafter, from a run folder or by themselves."""

    run_folder: Annotated[Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None
    """Folder of a finished run; it names target, drafter and settings."""
    target: str | None = None
    """Folder or hub name of the target; default: the run's."""
    drafter: str | None = None
    """Folder of the drafter, or `hub:NAME[@REVISION]`; default: the run's."""


@dataclass
class Pair(RunPair):
    """The same, and what drafts."""

    method: Annotated[str, tyro.conf.arg(help=_METHODS)] = "trained"


@dataclass
class AtServer:
    """A running server with OpenAI's endpoints."""

    server: str | None = None
    """URL of a running server (vLLM, SGLang) that is asked in place of our own decoder; its key comes
    from OPENAI_API_KEY."""
    model: str | None = None
    """Name that the server knows the target by."""
    retries: int = 5
    """Tries of a request to the server after the first one, later and later."""
    timeout: float = 600.0
    """Seconds that one answer of the server may take."""


@dataclass
class EvalRequest(AtServer, Pair):
    """Measure acceptance and speed with the real decoder, or of a server, beside the audit's verdict."""

    prompts: str | None = None
    """A file, `stdlib`, or sets with commas between: NAME, NAME@REVISION, NAME=FILE; default: the recipe's."""
    out: Path | None = None
    """Folder for results.json; default RUN/eval, without RUN a folder eval-NAME here, of the
    drafter's or the methods' name."""
    audit: bool = True
    """Run the losslessness audit first; --no-audit shows "not audited" in its place."""
    samples: int = 0
    """Also write that many samples per prompt: agreement with the greedy answer, majority vote."""
    baseline_server: str | None = None
    """URL of the same server without speculation, which takes turns with --server."""
    concurrency: tuple[int, ...] = ()
    """Requests under way at the server at a time, one or several numbers; default 1."""
    rate: tuple[float, ...] = ()
    """Requests a second that arrive at the server, whatever is under way; one or several numbers."""
    requests: int | None = None
    """Requests to the server of each load; default: every prompt once, and 24 for each one at a time."""


@dataclass
class AuditRequest(AtServer, Pair):
    """Prove that the decoder's output, or a server's, is the target's own; exit code 5 if it is not."""

    plant: str | None = None
    """A known bug to decode with; the audit then has to fail."""
    decoder: Literal["draftsmith", "hf"] = "draftsmith"
    """`hf` audits transformers' own assisted generation."""
    prompts: str | None = None
    """A file, `stdlib`, or sets with commas between: NAME, NAME@REVISION, NAME=FILE; default: the recipe's."""
    out: Path | None = None
    """Folder for audit.json; default RUN/eval, without RUN a folder eval-NAME here, of the
    drafter's or the methods' name; of --survey the folder that you are in."""
    determinism: bool = False
    """In place of the audit: greedy text at other batch sizes, paddings, widths and dtypes."""
    survey: bool = False
    """In place of the audit: every method and rule over tables, at many temperatures; no pair."""
    concurrency: int = 8
    """Requests to the server at a time."""


@dataclass
class TreeRequest(RunPair):
    """Choose the static tree of heads or of EAGLE by what they are measured to get right."""

    nodes: str | None = None
    """Nodes of the tree, the root included; `auto` takes the fastest size on this machine; default:
    as many as the drafter's default tree has."""
    method: Literal["greedy", "dp"] = "greedy"
    """How the tree is searched; both find one of the same worth."""
    depth: int = 6
    """Deepest candidate that is measured; heads have one depth each."""
    texts: int = 32
    """Held-out texts of the training data to measure on, `eval.max_new_tokens` of each."""
    temperature: float = 0.0
    """At which the target writes them."""
    out: Path | None = None
    """File to write; default `tree.json` beside the drafter, for `--drafter.tree optimised`."""


@dataclass
class TuneRequest:
    """Find the setting of drafters that is fastest on this machine, and keep it beside each."""

    runs: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")] = ()
    """Folders of finished runs on one target; the first one names target and settings."""
    target: str | None = None
    """Folder or hub name of the target; default: the first run's."""
    drafter: str | None = None
    """Folder of the drafter, or `hub:NAME[@REVISION]`; default: the first run's."""
    method: Annotated[str, tyro.conf.arg(help=_METHODS)] = "trained,prompt-lookup"
    temperature: float = 0.0
    """At which it is to be fast."""
    batch: int = 1
    """Prompts decoded together."""
    chains: bool = False
    """Leave trees out: most serving engines draft chains alone."""
    prompts: str | None = None
    """A file, `stdlib`, or sets with commas between, as for `eval`; default: held-out rows of the training data."""
    limit: int | None = None
    """Most prompts, of all sets together; a quarter of them is for the predictions; default: 32, or 8 batches."""
    best: int = 4
    """Settings that are measured, those that promise most."""
    surfaces: bool = True
    """Measure at which batches, contexts and temperatures the best pay; sizes are predicted anyway."""
    out: Path | None = None
    """Folder for tune.json; default RUN/eval, without RUN the one that you are in."""


@dataclass
class CompareRequest:
    """Measure any number of drafters and methods on one target in one interleaved run, each audited."""

    target: Positional[str]
    """Folder, GGUF file or hub name of the target."""
    drafters: tuple[str, ...] = ()
    """Runs, drafters' folders, ours or as others publish them, and `hub:NAME[@REVISION]`."""
    method: Annotated[str | None, tyro.conf.arg(help=_COMPARED)] = None
    tuned: Path | None = None
    """tune.json of `draftsmith tune`, whose settings the methods without a drafter take."""
    prompts: str = "stdlib"
    """A file, `stdlib`, or sets with commas between: NAME, NAME@REVISION, NAME=FILE."""
    out: Path = Path("compare")
    """Folder for results.json; the same command goes on there."""
    audit: bool = True
    """Run the losslessness audit of each first; --no-audit shows "not audited" in its place."""


@dataclass
class AdaptRequest:
    """Let a run's drafter follow a target that is being tuned: train it on new rollouts, use it where it is better."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished run; its recipe and its drafter are begun with."""
    target: str
    """Folder, GGUF file or hub name of the target as it is now; read anew in every round."""
    rollouts: Path
    """JSONL file, or a folder of such files: rows of any shape that `data.source` reads, best the target's own
    answers. They may grow; a round takes what no round has read."""
    out: Path | None = None
    """Folder with the drafter in use, `adapted.json` and the rounds; default RUN/adapted."""
    steps: int = 100
    """Training steps of a round."""
    minutes: float | None = None
    """Of training, in place of --steps: as many steps as take so long at the pace of the training before."""
    rows: int = 64
    """Fewest new rollouts that begin a round."""
    prompts: int = 32
    """Most held-out prompts that both drafters draft for."""
    temperature: float = 1.0
    """At which the target writes there."""
    audit: bool = True
    """Audit a new drafter before it may be used; --no-audit shows "not audited" in its place."""
    watch: bool = False
    """Wait for more rollouts, until a signal."""
    poll: float = 10.0
    """Seconds between two looks."""


@dataclass
class ChatRequest(Pair):
    """Type prompts and watch the drafter work: tokens coloured by origin, speed beside plain decoding."""

    prompt: str | None = None
    """A single prompt; default: one per line that you type, each a turn of the same chat."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    plain: bool = True
    """Decode each prompt without the drafter too, to compare; --no-plain saves the time."""


@dataclass
class DatastoreRequest:
    """Build the datastore that the methods `rest` and `suffix` retrieve from."""

    action: Positional[Literal["build"]]
    """What to do."""
    source: str
    """Texts, as in data.source: `stdlib`, a file, a folder, a glob, `hub:NAME[:CONFIG]`."""
    out: Path
    """New folder."""
    target: str = "tiny"
    """Folder or hub name of the target, whose tokenizer is used."""
    limit: int | None = None
    """Use only the first rows."""
    shard_tokens: int | None = None
    """Most tokens of a shard, of which building takes up to 48 bytes of memory each; default: what half of the free
    memory sorts."""


@dataclass
class DeriveRequest:
    """Make a drafter of the target itself, without training: a quantised copy, or an early exit."""

    kind: Positional[Literal["quantised", "early-exit"]]
    """A copy with weights of fewer bits, or the target's first layers."""
    out: Path
    """New folder of the drafter."""
    target: str = "tiny"
    """Folder or hub name of the target."""
    revision: str | None = None
    """Commit, tag or branch of the target on the hub."""
    bits: Literal[4, 8] | None = None
    """Of `quantised`: bits of a weight; default 8."""
    group_size: int | None = None
    """Of 4 bits: inputs that share a scale; default: the largest of 128, 64, 32, 16 that fits."""
    layers: int | None = None
    """Of `early-exit`: how many layers draft."""


@dataclass
class ReportRequest:
    """Write report.html and report.md of an evaluated run, or comparison.html of several."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, which holds eval/results.json, or an --out of `eval`."""
    others: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")] = ()
    """More of them, to compare: one page in the first one's folder, and one table of them all."""
    markdown: bool = False
    """Write table.md too: the table that papers print, a row for each target, temperature and method, a column for
    each prompt set and one for their mean."""
    latex: bool = False
    """Write that table as table.tex."""
    beside: tuple[Path, ...] = ()
    """Other runs on the same prompt sets, whose rows follow in that table."""


@dataclass
class ConvertRequest:
    """Write a GGUF file's model as an ordinary folder: config, safetensors, tokenizer, chat template."""

    file: Annotated[Positional[Path], tyro.conf.arg(metavar="FILE.gguf")]
    """The file, or a folder that holds one and no other model."""
    out: Path
    """New folder."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the weights; fp32 holds those of the file exactly, whatever `target.dtype` is later."""


@dataclass
class ConvertResultsRequest:
    """Write a run's answers as Spec-Bench's answer files, or such files as results.json."""

    source: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN_OR_FILES")]
    """Folder that `eval` or `compare` wrote; or answer files of Spec-Bench, one a method."""
    out: Path
    """Folder for the answer files, one of each method and of plain decoding; or for results.json."""
    baseline: Path | None = None
    """Of answer files: that of plain decoding, without which nothing says what is gained."""
    target: str | None = None
    """Of answer files: the target's name in tables; default: the baseline's model_id."""
    temperature: float | None = None
    """Of answer files: that they were made at; default: what their names say."""


@dataclass
class ConvertDrafterRequest:
    """Write a drafter that others published as a drafter folder of ours; `--drafter` takes it as it is, too."""

    drafter: Annotated[Positional[str], tyro.conf.arg(metavar="DRAFTER")]
    """Its folder, or `hub:NAME[@REVISION]`."""
    target: str
    """Folder or hub name of the target that it was made for, which it is held to."""
    out: Path
    """New folder."""
    reading: str | None = None
    """The reading to write it under, as `inspect-drafter` names it; default: as `--drafter` reads it."""
    revision: str | None = None
    """Commit, tag or branch of the target on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the target. Leave off unless you have read it."""


@dataclass
class InspectDrafterRequest:
    """Say what the form of a published drafter leaves open, and which reading of it acceptance supports."""

    drafter: Annotated[Positional[str], tyro.conf.arg(metavar="DRAFTER")]
    """Its folder, or `hub:NAME[@REVISION]`."""
    target: str
    """Folder or hub name of the target that it was made for."""
    prompts: str = "stdlib"
    """`stdlib` or a JSONL file."""
    limit: int = 8
    """Most prompts; every one is decoded once under each reading."""
    prompt_tokens: int = 128
    """Of a longer prompt the last so many tokens."""
    max_new_tokens: int = 48
    """Most tokens of an answer."""
    revision: str | None = None
    """Commit, tag or branch of the target on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the target. Leave off unless you have read it."""


@dataclass
class ExportRequest:
    """Write a trained drafter as a folder that a serving engine loads."""

    run_folder: Annotated[Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None
    """Folder of the run."""
    drafter: str | None = None
    """Folder of a drafter, or `hub:NAME[@REVISION]`, in place of a run; with --target and --out."""
    format: Annotated[Format, tyro.conf.arg(help=f"Whose: {served()}.")] = "vllm"
    out: Path | None = None
    """New folder; default RUN/FORMAT."""
    target: str | None = None
    """Folder or hub name that the engine knows the target by; default: the run's."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the weights."""
    trust_remote_code: bool = False
    """Run code that comes with the target. Leave off unless you have read it."""


@dataclass
class PushRequest:
    """Put a run's drafter on a hub, with a card of what it is worth; a dry run where HF_TOKEN is not set."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    name: Annotated[Positional[str], tyro.conf.arg(metavar="HUB_NAME")]
    """OWNER/NAME, made if it is not there."""
    dry_run: bool = False
    """Show the card and what would go up; nothing is asked of the hub."""
    private: bool = False
    """For its owner alone."""
    license: str | None = None
    """Its id on the hub, such as apache-2.0; default: what the target's own card says, or unknown."""
    base_model: str | None = None
    """The target's name on the hub; default: the recipe's, where that is one."""


@dataclass
class GenerateRequest:
    """Answer the rows of a source anew by the target; run it again to go on after a stop."""

    source: str
    """Rows, as in data.source: `stdlib`, a file, a folder, a glob, `hub:NAME[:CONFIG]`, or a set by name, as
    `ls --sources` lists them."""
    out: Path
    """Folder for answers.jsonl, rejected.jsonl and manifest.json."""
    target: str = "tiny"
    """Folder or hub name; beside --server only its tokenizer and config are read."""
    drafter: str | None = None
    """Folder of a drafter that makes it faster, or `hub:NAME[@REVISION]`; the distribution of the
    answers stays the target's."""
    corrections: bool = False
    """Also write corrections.jsonl: rows whose labels are the tokens at which the target corrected
    that drafter, to train it on."""
    server: str | None = None
    """URL of a server with OpenAI's endpoints, instead of our own decoder."""
    model: str | None = None
    """Name that the server knows the target by."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw from the likeliest tokens alone; 0: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with that probability."""
    max_new_tokens: int = 512
    """Most tokens of an answer."""
    seed: int = 0
    """With a row's number in the source it decides the row's random numbers."""
    batch: int | None = None
    """Rows decoded together, which changes no answer; default: the fastest here, timed on the first rows."""
    limit: int | None = None
    """Read only the first rows."""
    prompt_tokens: int = 64
    """Tokens of a plain text that are its prompt."""
    drop_cut: bool = False
    """Leave out chats with an answer that max_new_tokens cut off; else it is kept, and learnt without an end."""
    keep_cut: bool = False
    """What is done without --drop-cut; of an earlier version."""
    concurrency: int = 8
    """Requests to the server at a time."""
    retries: int = 5
    """Tries after the first one, later and later."""
    timeout: float = 600.0
    """Seconds that one answer of the server may take."""


@dataclass
class QuickstartRequest:
    """From nothing to a trained, audited and reported drafter, offline, on a CPU."""

    out: Path = Path("quickstart")
    """Folder for everything."""
    steps: int | None = None
    """Train for so many steps alone: the whole way in less time, with no figure to quote."""


@dataclass
class DoctorRequest:
    """Print the environment block that a bug report needs."""
