"""`draftsmith generate`: the answers of a source's rows, written anew by the target.

Read next: `data/generate/answers.py` for rows, `data/generate/decoded.py` and `data/generate/server.py` for answers.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drafters.hub import drafter_folder
from ..drafters.tuned_file import DRAFT_LENGTH, Tuned, read_tuned
from ..errors import RequestError, Stopped
from ..eval.measure.environment import drafter_hash
from ..storage.identity import flat
from ..trainers.loop.interruptions import Interrupted, interrupt_on_signal
from .check.early import check_least
from .recipe.load import without_run
from .recipe.model import Recipe
from .requests import GenerateRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.config import DataConfig
    from ..data.generate.answers import Asker
    from ..data.generate.journal import Journal
    from ..data.generate.server_request import ServerRequest
    from ..data.rows.raw import Rejected
    from ..data.rows.records import Placed
    from ..data.rows.sources import Source
    from ..drafters.identity import TargetIdentity

    Rows = Iterator[Placed | Rejected]

_log = logging.getLogger(__name__)
# the recipe values that are read here; any other is refused
_READ = ("data", "target", "drafter")
# the fields of `data` that decide which rows there are
_OF_DATA = {"revision", "split", "shape", "columns", "sequence_length"}


@dataclass(frozen=True)
class _Way:
    """One of the two ways to answers: what the target is there, and how rows are answered."""

    tokenizer: PreTrainedTokenizerBase
    identity: TargetIdentity
    eos_ids: tuple[int, ...]
    positions: int
    """Tokens of a prompt and the drafts behind its answer that the target has room for."""
    settings: dict[str, Any]
    session: dict[str, Any]
    answer: Callable[[Rows, Asker, Journal], None]


def generate(request: GenerateRequest, overrides: Sequence[tuple[str, str]]) -> str:
    """Generate, or continue where an earlier call was stopped; returns a summary of the folder.

    Raises:
        RequestError: a flag is wrong, or the folder is another generation's. Stopped: a signal ended it.
    """
    with interrupt_on_signal():
        return _generated(request, overrides)


def _generated(request: GenerateRequest, overrides: Sequence[tuple[str, str]]) -> str:
    server = _check(request, overrides)
    tuned = Tuned({})
    if request.drafter is not None:
        folder = drafter_folder(request.drafter)  # of a hub's one revision, whatever appears there meanwhile
        request = replace(request, drafter=str(folder))
        tuned = read_tuned(folder).unless(name for name, _ in overrides)
        if tuned.values:
            _log.info("tuned for %s: %s", tuned.measured, tuned.shown)
        elif tuned.plain:
            request = _plainly(request, tuned)
    recipe = without_run([*tuned.values.items(), *overrides])

    from ..data.generate.answers import CORRECTIONS, Asker
    from ..data.generate.journal import Journal
    from ..data.generate.progress import Progress
    from ..data.rows.records import RecordReader
    from ..data.rows.sources import open_sources
    from ..eval.measure.environment import environment

    limit = request.limit or recipe.data.limit_rows
    config = recipe.data.model_copy(update={"source": request.source, "limit_rows": limit})
    source, _ = open_sources(config)
    if server is not None:
        server = replace(server, template_values=config.template_values)
    way = _by_decoder(request, recipe) if server is None else _by_server(request, recipe, server)
    config = _on_a_day(config, way.tokenizer, request.out)
    asker = Asker(
        way.tokenizer,
        request.prompt_tokens,
        _longest_prompt(request, way),
        not request.drop_cut,
        text_prompts=server is not None,
        data=config,
    )
    settings = _settings(request, config, source, way)
    extra = (CORRECTIONS,) if request.corrections else ()
    with Journal(request.out, settings, environment() | way.session, extra) as journal:
        if not journal.complete:
            with _kept(journal):
                _before(way, asker, RecordReader(config).read(source))
                total = sum(1 for _ in RecordReader(config).read(source))  # far less work than to answer them
                journal.progress = Progress(total, len(journal))
                with closing(journal.progress):
                    way.answer(RecordReader(config).read(source), asker, journal)
                journal.publish()
        return _summary(journal.manifest, request)


@contextmanager
def _kept(journal: Journal) -> Iterator[None]:
    """Inside, a signal ends the work with what is kept of it, and how to go on."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as left:
        name = "SIGINT" if isinstance(left, KeyboardInterrupt) else str(left).partition(":")[0]
        raise Stopped(
            f"{name}: stopped with {len(journal):,} rows done, {journal.answered:,} of them answered, which "
            f"{journal.folder} keeps; the same command goes on with the next"
        ) from None


def _on_a_day(config: DataConfig, tokenizer: PreTrainedTokenizerBase, out: Path) -> DataConfig:
    """The day that the folder was begun on, for a template with a clock; for others none."""
    from ..data.generate.journal import template_of
    from ..data.rows.templates import reads_clock, today

    if not reads_clock(tokenizer, values=config.template_values):
        return config.model_copy(update={"template_date": None})
    day = config.template_date or template_of(out).get("date") or today()
    _log.info("the chat template has a clock, which shows %s (data.template_date)", day)
    return config.model_copy(update={"template_date": day})


def _before(way: _Way, asker: Asker, rows: Rows) -> None:
    """What can be said before anything is asked: that answers do not end, or that none would be learnt from.

    Raises:
        DataError: training would leave out each of the first rows.
    """
    from ..data.rows.chats.ends import endless_answers

    warning = endless_answers(way.tokenizer, way.eos_ids)
    if warning is not None:
        _log.warning("%s", warning)
    ids = asker.encoder.tokenizer("so", add_special_tokens=False)["input_ids"]
    asker.rehearse(rows, [*ids, *way.eos_ids[:1]] if way.settings["answered_by"] == "decoder" else None)


def _plainly(request: GenerateRequest, tuned: Tuned) -> GenerateRequest:
    """The request without its drafter, which slows decoding down.

    Raises:
        RequestError: what is asked for needs one.
    """
    drafting = f"a flag for drafter.* or {DRAFT_LENGTH} drafts"
    if request.corrections:
        raise RequestError(
            f"{tuned.none_pays('so nothing would be drafted')}, and --corrections keeps where a draft was corrected: "
            f"{drafting} all the same"
        )
    _log.info("%s", tuned.none_pays(f"answers are decoded plainly; {drafting}"))
    return replace(request, drafter=None)


def _check(request: GenerateRequest, overrides: Sequence[tuple[str, str]]) -> ServerRequest | None:
    """Refuse what can be refused before anything is loaded; what to ask a server, if one is named.

    Raises:
        RequestError: a flag is out of its range, or does not go with another.
    """
    for name, _ in overrides:
        if name.split(".")[0] not in _READ and name != DRAFT_LENGTH:
            raise RequestError(
                f"--{name} has no say in generate, which reads {', '.join(_READ)} and "
                f"{DRAFT_LENGTH}; sampling is set by flags: draftsmith generate --help"
            )
    check_least(request, max_new_tokens=1, batch=1, prompt_tokens=1, concurrency=1, limit=1)
    check_least(request, temperature=0, top_k=0, retries=0)
    if not 0 < request.top_p <= 1:
        raise RequestError(f"--top-p is {request.top_p}; expected more than 0, at most 1")
    if not request.timeout > 0:
        raise RequestError(f"--timeout is {request.timeout}; expected seconds, more than 0")
    if request.keep_cut:
        if request.drop_cut:
            raise RequestError("--keep-cut and --drop-cut are both given; leave out one of them")
        _log.info("--keep-cut: answers that are cut off are kept anyway, and --drop-cut leaves them out")
    if request.corrections and request.drafter is None:
        raise RequestError("--corrections keeps where a draft was corrected: it needs --drafter")
    return _server_request(request)


def _server_request(request: GenerateRequest) -> ServerRequest | None:
    if request.server is None:
        if request.model is not None:
            raise RequestError("--model names the model of a --server, and none is given")
        return None
    if request.model is None:
        raise RequestError("--server needs --model, the name that the server knows the target by")
    if request.drafter is not None:
        raise RequestError("--drafter drafts for our own decoder: leave out it, or --server")
    from ..data.generate.server_request import ServerRequest

    asked = ServerRequest(
        request.server,
        request.model,
        request.temperature,
        request.top_k,
        request.top_p,
        request.max_new_tokens,
        request.seed,
        concurrency=request.concurrency,
        retries=request.retries,
        timeout=request.timeout,
    )
    _ = asked.base_url  # refuses what is no URL
    return asked


def _by_decoder(request: GenerateRequest, recipe: Recipe) -> _Way:
    from ..data.features.model_hash import model_hash
    from ..data.generate.answers import CORRECTIONS
    from ..data.generate.decoded import Answerer, answer_rows
    from ..decoding.backbone.loading import load_target
    from ..decoding.sampling import Warper
    from ..drafters.identity import TargetIdentity
    from .drafted import load_trained

    config, length = recipe.target, recipe.eval.draft_length
    target = load_target(
        request.target,
        revision=config.revision,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        quantization=config.quantization,
    )
    drafter, drafted = None, None
    if request.drafter is not None:
        drafter = load_trained(request.drafter, recipe, target)
        # names without dots, as folders that were begun before there were sections have them
        own = {name.replace(".", "_"): value for name, value in flat(recipe.drafter.model_dump(mode="json")).items()}
        drafted = own | {"sha256": drafter_hash(Path(request.drafter)), "draft_length": length}
        if request.corrections:
            drafted |= {CORRECTIONS: True}
    answerer = Answerer(
        target,
        drafter,
        Warper(request.temperature, request.top_k, request.top_p),
        request.max_new_tokens,
        request.seed,
        request.batch,
        request.corrections,
    )
    return _Way(
        target.tokenizer,
        TargetIdentity.of(target),
        target.eos_ids,
        target.context - (0 if drafter is None else drafter.draft_length),
        {
            "answered_by": "decoder",
            "batch": request.batch,
            "dtype": config.dtype,
            "drafter": drafted,
            "weights": model_hash(target.model),
        },
        {"device": str(target.device)},
        lambda rows, asker, journal: answer_rows(rows, asker, answerer, journal),
    )


def _by_server(request: GenerateRequest, recipe: Recipe, server: ServerRequest) -> _Way:
    """The target's tokenizer and config are still ours to read: they name it, and count tokens."""
    from ..data.generate.server import answer_rows
    from ..data.generate.server_defaults import filled_in
    from ..decoding.backbone.hub import ends_of, generation_settings, load_config, load_tokenizer
    from ..drafters.identity import TargetIdentity, fingerprint

    own: dict[str, Any] = {"revision": recipe.target.revision, "trust_remote_code": recipe.target.trust_remote_code}
    tokenizer = load_tokenizer(request.target, **own)
    config: Any = load_config(request.target, **own).get_text_config(decoder=True)
    if (sentence := filled_in(generation_settings(request.target, revision=recipe.target.revision))) is not None:
        _log.warning("%s", sentence)
    identity = TargetIdentity(
        request.target.rstrip("/").rsplit("/", 1)[-1],
        recipe.target.revision,
        int(config.hidden_size),
        int(config.vocab_size),
        fingerprint(tokenizer),
    )
    return _Way(
        tokenizer,
        identity,
        ends_of(request.target, config),
        # what bounds our decoder alone, as frequencies that change with the length, a server does itself
        int(getattr(config, "max_position_embeddings", 2**31)),
        {"answered_by": "server", "model": server.model},
        {"server": server.public_url},
        lambda rows, asker, journal: answer_rows(rows, asker, server, journal),
    )


def _longest_prompt(request: GenerateRequest, way: _Way) -> int:
    longest = way.positions - request.max_new_tokens
    if longest < 1:
        raise RequestError(
            f"--max-new-tokens is {request.max_new_tokens}; the target {way.identity.name} has "
            f"{way.positions} positions for prompt and answer together"
        )
    return longest


def _settings(request: GenerateRequest, config: DataConfig, source: Source, way: _Way) -> dict[str, Any]:
    """All that shapes the answers: a folder goes on with these alone."""
    template = way.tokenizer.chat_template
    told = {"values": config.template_values, "date": config.template_date}
    return {
        **way.settings,
        "target": way.identity.to_dict() | {"chat_template": None if template is None else _sha256(str(template))},
        "source": {
            "name": source.name,
            "fingerprint": source.identity(),
            "limit": config.limit_rows,
            **config.model_dump(mode="json", include=_OF_DATA),
        },
        "sampling": {
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "max_new_tokens": request.max_new_tokens,
            "seed": request.seed,
        },
        **({"template": told} if any(told.values()) else {}),
        "prompt_tokens": request.prompt_tokens,
        "keep_cut": not request.drop_cut,
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _summary(manifest: dict[str, Any], request: GenerateRequest) -> str:
    rows, answers, drafted = manifest["rows"], manifest["answers"], manifest["acceptance"]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in rows["rejected_by_kind"].items())
    lines = [
        f"{request.out}: {rows['answered']:,} rows answered in {answers['tokens']:,} tokens, "
        f"{rows['rejected']:,} rejected{f' ({kinds})' if kinds else ''}"
    ]
    if answers["cut"]:
        lines.append(
            f"cut off by a limit of {request.max_new_tokens} tokens or less: {answers['cut']:,} of "
            f"{answers['turns']:,} answers, which are marked and learnt from without an end (--drop-cut leaves such "
            "chats out)"
        )
    if answers["retokenised"]:
        lines.append(
            f"{answers['retokenised']:,} of {answers['turns']:,} answers have other tokens as text: this target and "
            "template learn from the ids beside it, others leave these answers out of the loss"
        )
    if drafted is not None:
        lines.append(f"drafter: {drafted['tau']:.2f} tokens per target call (not audited)")
    if request.corrections:
        rows = manifest["corrections"]["rows"]
        lines.append(f"corrected: {rows:,} rows in {request.out / 'corrections.jsonl'}")
    names = [name for name in manifest["files"] if name.startswith("answers")]
    path = request.out / (names[0] if len(names) == 1 else "answers-*.jsonl")
    lines.append(f"next: draftsmith train RECIPE --data.source {shlex.quote(str(path))}")
    return "\n".join(lines)
