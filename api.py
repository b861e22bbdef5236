"""The Python door: what a researcher calls, on the embedded target or a model of their own.

Each function takes what a notebook has (texts or token ids, a drafter of any class, fields by name), asks the rooms
that do the work, and returns something that a notebook can show. Read next: `docs/notebook.md`, a drafter from idea
to verdict; `eval/notebook.py`, the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from .config import changed
from .data.prompts import Prompt, render
from .decoding import engine
from .decoding.request import check_drafter, check_target, prompt_ids
from .decoding.sampling import Warper
from .drafters import registry
from .drafters.families import FAMILIES
from .errors import RequestError
from .eval.audit import audit as proofs
from .eval.audit.audit import AuditReport
from .eval.config import AuditConfig, EvalConfig
from .eval.measure.arms import Arm, check_answer_length
from .eval.measure.evaluate import evaluate
from .eval.measure.requests import Request, first_turns, make_requests
from .eval.notebook import Decoded, Measurement
from .launch.recipe.load import load_recipe

if TYPE_CHECKING:
    from .decoding.backbone.backbone import Backbone
    from .decoding.proposal import Proposer
    from .decoding.rules.acceptance import Rule
    from .drafters.config import DrafterConfig
    from .eval.audit.decoders import Decode
    from .eval.audit.toys import MakeToy

Prompts = Sequence["str | Sequence[int] | Prompt"]
"""Texts to continue, token ids, or prompts as `load_prompts` reads them (chats among them)."""
_GIVEN = "given"


def load_drafter(
    path: str | Path,
    target: Backbone,
    *,
    draft_length: int | None = None,
    config: DrafterConfig | None = None,
    **changes: Any,
) -> Proposer:
    """Load a drafter that was trained for `target`.

    Args:
        path: a run (`runs/mine`), the drafter's folder in it, or `hub:NAME[@REVISION]`.
        draft_length: tokens of a chain, depth of a tree by confidence; of a run by default as its recipe says, or 4.
        config: how it proposes; of a run by default as its recipe says.
        changes: fields of it, as `policy="argmax"` or `eagle_tree="dynamic"`.

    Raises:
        RequestError: there is no drafter, or it was made for another target; the message names what differs.
    """
    from .drafters.config import DrafterConfig

    check_target(target)
    if not isinstance(path, str | Path) or not str(path):
        raise RequestError(f"the drafter is {path!r:.60}; expected a run, a drafter's folder, or hub:NAME[@REVISION]")
    run = Path(path)
    if (run / "run.yaml").is_file():
        recipe = load_recipe(str(run / "run.yaml")).recipe
        path, config, draft_length = (
            run / "drafter",
            config or recipe.drafter,
            draft_length or recipe.eval.draft_length,
        )
    config = changed(config or DrafterConfig(), changes)
    return registry.load_drafter(path, target, draft_length=4 if draft_length is None else draft_length, config=config)


def generate(
    target: Backbone,
    drafter: Proposer,
    prompts: Prompts,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    warper: Warper | None = None,
    max_new_tokens: int = 64,
    eos_ids: Sequence[int] | None = None,
    seed: int = 0,
    rule: Rule | str | None = None,
    **how: Any,
) -> Decoded:
    """Decode prompts with a drafter; the text is the target's own, in fewer calls.

    Args:
        prompts: a list of texts or of lists of token ids; a text is encoded as training text is.
        temperature, top_k, top_p, min_p: the distribution that is decoded; or `warper` for all of them.
        eos_ids: ids that end a row; by default those by which the target ends.
        seed: of the random numbers; the same one writes the same text.
        rule: an acceptance rule by name; by default the one that is lossless for how the drafter draws.
        how: further arguments of `decoding/engine.py`, `generate`: `watch`, `requests`, `graphs` and others.

    Returns:
        `tokens`, `texts`, `tau`, and where each token comes from.
    """
    check_target(target)
    warper = _warper(warper, temperature, top_k, top_p, min_p)
    ends = target.eos_ids if eos_ids is None else eos_ids
    common: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_ids": ends, "seed": seed, **how}
    done = engine.generate(target, drafter, ids_of(target, prompts), warper=warper, rule=rule, **common)
    return Decoded(**vars(done), target=target)


def autoregressive(
    target: Backbone,
    prompts: Prompts,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    warper: Warper | None = None,
    max_new_tokens: int = 64,
    eos_ids: Sequence[int] | None = None,
    seed: int = 0,
    **how: Any,
) -> Decoded:
    """Decode without a drafter, one token per target call: the baseline. Arguments are those of `generate`."""
    check_target(target)
    warper = _warper(warper, temperature, top_k, top_p, min_p)
    ends = target.eos_ids if eos_ids is None else eos_ids
    common: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_ids": ends, "seed": seed, **how}
    done = engine.autoregressive(target, ids_of(target, prompts), warper=warper, **common)
    return Decoded(**vars(done), target=target)


def audit(
    target: Backbone,
    drafter: Proposer | None,
    prompts: Prompts,
    config: AuditConfig | None = None,
    *,
    toy: MakeToy | None = None,
    plant: str | None = None,
    decoder: Literal["draftsmith", "hf"] = "draftsmith",
    decode: Decode | None = None,
    rule: str | None = None,
    **changes: Any,
) -> AuditReport:
    """Prove that decoding with a drafter leaves the target's distribution as it is (docs/audit.md).

    Args:
        drafter: of any class. For one of your own the enumeration over tables is left out, and the report says so,
            unless `toy` makes it.
        prompts: as of `generate`; they are used over and over.
        config: how much evidence is collected.
        toy: your proposer over tables, from a target and drafts that are tables (`eval/audit/toy_models/table.py`).
        plant: a known bug to decode with: the audit then has to fail.
        decoder: `hf` audits transformers' own assisted generation.
        decode: a decoder of yours, audited in place of ours: a function of prompts (lists of token ids) and a
            `DecodeRequest` that returns the new token ids of each (docs/prove-your-engine.md). `drafter` is then the
            draft model that it uses, which makes the tests sharper, or None.
        rule: an acceptance rule by name; of a lossy one the distance is measured.
        changes: fields of `config`, as `tokens=2_000`; the defaults take minutes.

    Returns:
        `verdict`, the proofs, and what each would have seen; `text()` has all of it in words.
    """
    check_target(target)
    if decoder not in ("draftsmith", "hf"):
        raise RequestError(f"decoder is {decoder!r}; expected 'draftsmith' or 'hf'")
    if decode is None or drafter is not None:
        check_drafter(drafter)
    if decode is not None and (not callable(decode) or decoder == "hf" or rule is not None):
        raise RequestError(
            f"decode is {decode!r:.80}, beside decoder {decoder!r} and rule {rule!r}; expected a function of prompts "
            "and a DecodeRequest, which decides by itself what it accepts: leave the others out"
        )
    settings = changed(config or AuditConfig(), changes)
    ids = ids_of(target, prompts)
    whose: proofs.Decoder = decoder if decode is None else "function"
    return proofs.audit(target, drafter, ids, settings, plant=plant, decoder=whose, decode=decode, rule=rule, toy=toy)


def measure(
    target: Backbone,
    drafter: Proposer | Mapping[str, Proposer],
    prompts: Prompts,
    config: EvalConfig | None = None,
    *,
    audit: AuditConfig | AuditReport | Mapping[str, AuditReport] | Literal[False] | None = None,
    **changes: Any,
) -> Measurement:
    """Measure what a drafter is worth: tau, alpha by depth, speed-up over plain decoding, with intervals.

    Acceptance is never without a verdict: each drafter is audited first, on the same prompts.

    Args:
        drafter: one, or several by name, which are measured in turn.
        prompts: as of `generate`; a text is cut to the last `prompt_tokens` of them, ids are taken as they are.
        config: temperatures, lengths, repeats; `draft_length` is for draft models and ensembles, others have theirs.
            By default no other draft lengths are swept.
        audit: how much evidence the audit collects; or the report of an audit of this very drafter (several by name);
            False to leave it out, and then the verdict is "not audited".
        changes: fields of `config`, as `temperatures=[0.0]`.

    Raises:
        RequestError: answers so short that no step can be counted, or a report of another drafter or rule.
    """
    check_target(target)
    drafters = dict(drafter) if isinstance(drafter, Mapping) else {_title(drafter): drafter}
    settings = changed(config or EvalConfig(sweep=[]), {**changes, "prompts": _GIVEN})
    for each in drafters.values():
        check_drafter(each)
    arms = [Arm(name, each) for name, each in drafters.items()]
    if not arms:
        raise RequestError("there is no drafter to measure; expected one, or several by name")
    check_answer_length(arms, settings)
    requests, left_out = _requests(target, prompts, settings)
    reports = _reports(target, drafters, first_turns(requests), settings, audit)
    judged = [
        Arm(name, each, reports[name].verdict, distance=reports[name].distance) if name in reports else Arm(name, each)
        for name, each in drafters.items()
    ]
    results = evaluate(target, judged, requests, settings, left_out=left_out)
    return Measurement({**results, "second": []}, reports)


def _reports(
    target: Backbone,
    drafters: Mapping[str, Proposer],
    ids: Sequence[Sequence[int]],
    settings: EvalConfig,
    audit: AuditConfig | AuditReport | Mapping[str, AuditReport] | Literal[False] | None,
) -> dict[str, AuditReport]:
    """Each drafter's audit: the one that was given, or one that is made now."""
    if audit is False:
        return {}
    if audit is None or isinstance(audit, AuditConfig):
        how = audit or AuditConfig()
        return {name: proofs.audit(target, each, ids, how, rule=settings.rule) for name, each in drafters.items()}
    if not isinstance(audit, (AuditReport, Mapping)):
        raise RequestError(f"audit is {audit!r:.60}; expected a report, reports by name, an AuditConfig, or False")
    given = {next(iter(drafters)): audit} if isinstance(audit, AuditReport) else dict(audit)
    for name, each in drafters.items():
        report = given.get(name)
        if report is None or report.drafter is None or report.drafter() is not each:
            raise RequestError(
                f"audit holds no report of the drafter {name!r} itself; expected what draftsmith.audit(target, "
                "drafter, ...) returned for this very object, an AuditConfig, or False"
            )
        if report.rule != settings.rule or report.plant is not None:
            raise RequestError(
                f"the report on {name!r} is of rule {report.rule or 'by default'!r}"
                f"{f' with the planted bug {report.plant}' if report.plant else ''}, and it is measured with "
                f"{settings.rule or 'the default'!r}; audit it with the rule that is measured"
            )
    return {name: given[name] for name in drafters}


def _requests(target: Backbone, prompts: Prompts, settings: EvalConfig) -> tuple[list[Request], int]:
    """What is decoded of the prompts, and how many turns are left out for their length."""
    given = [_as_prompt(each, number) for number, each in enumerate(_listed(prompts), 1)]
    given = [
        each if isinstance(each, Prompt) else prompt_ids(each, at, len(given)) for at, each in enumerate(given, 1)
    ]
    made = [each for each in given if isinstance(each, Prompt)]
    rendered = make_requests(target, made, settings) if made else []
    requests = [
        Request(Prompt(f"prompt {n}", _GIVEN, ("",), chat=False), ids, 0)
        for n, ids in enumerate(given, 1)
        if not isinstance(ids, Prompt)
    ]
    numbered = [
        Request(each.prompt, each.ids, number, each.turn) for number, each in enumerate([*rendered, *requests])
    ]
    for each in numbered:
        if not each.ids:
            raise RequestError(f"{each.prompt.id} of {len(given)} is empty; expected a text of at least one token")
    return numbered, sum(len(each.points) for each in made) - len(rendered)


def ids_of(target: Backbone, prompts: Prompts) -> list[Any]:
    """Token ids of each prompt: texts encoded as the decoder does it, ids as they are.

    Raises:
        RequestError: a single text in place of a list.
    """
    if hasattr(prompts, "tolist"):
        return prompts  # type: ignore[return-value]  # the engine says what is wrong with it
    given = [_as_prompt(each, number) for number, each in enumerate(_listed(prompts), 1)]
    return [render(each, target.tokenizer) if isinstance(each, Prompt) else each for each in given]


def _listed(prompts: Prompts) -> Sequence[Any]:
    if isinstance(prompts, (str, bytes, Prompt)):
        raise RequestError(
            f"prompts is a single {type(prompts).__name__} ({prompts!r:.60}); expected a list of texts or of token "
            'ids: put it into a list; draftsmith.load_prompts("stdlib") reads a set'
        )
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        hint = '; of what a tokenizer returns take ["input_ids"]' if isinstance(prompts, Mapping) else ""
        raise RequestError(
            f"prompts is a {type(prompts).__name__} ({prompts!r:.60}); expected a list of texts or of token ids{hint}"
        )
    listed = list(prompts)
    if not listed:
        raise RequestError("there is no prompt; expected at least one")
    return listed


def _as_prompt(given: Any, number: int) -> Any:
    """A text as a prompt; token ids and prompts as they are."""
    return Prompt(f"prompt {number}", _GIVEN, (given,), chat=False) if isinstance(given, str) else given


def _warper(warper: Warper | None, temperature: float, top_k: int, top_p: float, min_p: float) -> Warper:
    own = (temperature, top_k, top_p, min_p)
    if warper is not None:
        if not callable(warper) or not hasattr(warper, "greedy") or isinstance(warper, type):
            raise RequestError(f"warper is {warper!r:.60}; expected draftsmith.Warper(temperature=0.8, ...)")
        if own != (0.0, 0, 1.0, 0.0):
            raise RequestError("warper is given beside temperature, top_k, top_p or min_p; expected one of the two")
        return warper
    for name, value in zip(("temperature", "top_k", "top_p", "min_p"), own, strict=True):
        if not isinstance(value, SupportsFloat):
            raise RequestError(f"{name} is {value!r:.60}; expected a number")
    try:
        return Warper(*own)
    except ValueError as error:
        raise RequestError(str(error)) from error


def _title(drafter: Proposer) -> str:
    """The drafter's name in a table: its family's, or its class."""
    family = str(getattr(drafter, "family", ""))
    return FAMILIES[family].title if family in FAMILIES else type(drafter).__name__
