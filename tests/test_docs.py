"""Every command in README and docs runs, on models made tiny by flags behind it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.data.rows.templates import named_template
from draftsmith.decoding.backbone.hub import embedded_target, load_tokenizer
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from helpers.models.gguf_files import write_llama
from helpers.models.shallow_target import SHALLOW
from helpers.runs.small_flags import AUDIT
from helpers.servers.served_target import Engine, serving

ROOT = Path(draftsmith.__file__).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# a newcomer's way is tried every day, the pages to look things up in by `make test-all`
DAILY = {"README.md", *(f"docs/{name}.md" for name in ("install", "serving", "sharing"))}
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
LONGEST_LINE = 200
SMALL_TRAINING = shlex.split(
    "--loop.steps 2 --loop.batch_rows 2 --loop.micro_rows 2 --loop.validate_rows 2 "
    "--data.sequence_length 64 --data.limit_rows 40 --checkpoint.every_steps 1 "
    "--model.layers 1 --model.hidden 32 --model.heads 2 --model.kv_heads 1 "
    "--model.head_size 16 --model.intermediate 32 --probe.prompts 1 "
    "--probe.max_new_tokens 6"
)
SMALL_AUDIT = [*AUDIT, "--eval.limit", "2"]
SMALL_EVAL = [*SMALL_AUDIT, *["--eval.max_new_tokens", "21", "--eval.sweep", "[1]", "--eval.repeats", "1"]]
EXTRA = {
    "train": SMALL_TRAINING,
    "eval": SMALL_EVAL,
    "audit": SMALL_AUDIT,
    "check": [],
    "inspect": ["--data.limit_rows", "40"],
    "tree": ["--texts", "2", "--eval.max_new_tokens", "12"],
    "chat": ["--max-new-tokens", "12"],
    "tune": ["--limit", "8", "--eval.max_new_tokens", "12", "--no-surfaces"],
    "generate": ["--limit", "6", "--max-new-tokens", "16"],
    "adapt": [
        *SMALL_AUDIT,
        "--steps",
        "2",
        "--prompts",
        "2",
        "--eval.max_new_tokens",
        "12",
        "--data.limit_rows",
        "null",
    ],
}
SMALL_MODEL = (
    "--families medusa --row-tokens 512 --dtype fp32 --training "
    "'--loop.validate_rows 2 --data.validation_share 0.2 --medusa.vocabulary 256'"
)
BENCHMARKS = {
    "benchmarks/families.py": (
        "--families 'BPD (frozen)' --steps 1 --wall 0 --limit 1 --max-new-tokens 12 --repeats 1 "
        "--audit-tokens 500 --audit-sequences 10000 --set data.limit_rows=40 "
        "--set data.sequence_length=64"
    ),
    "benchmarks/curves.py": (
        "--families 'BPD (frozen)' --lengths 1,2 --limit 1 --max-new-tokens 12 "
        "--audit-tokens 500 --audit-sequences 10000 --set data.limit_rows=40 "
        "--set data.sequence_length=64"
    ),
    "benchmarks/origins.py": (
        "--rows 'layers evenly,early exit 2' --steps 1 --limit 1 --max-new-tokens 12 "
        "--audit-tokens 500 --audit-sequences 10000 --set data.limit_rows=40 "
        "--set data.sequence_length=64"
    ),
    "benchmarks/alignment.py": (
        "--losses kl,tv --sources gold,request --from-scratch --steps 1 --batch-rows 2 "
        "--answers 40 --limit 2 --max-new-tokens 12 --prompt-tokens 8 --new-tokens 8 "
        "--audit-tokens 500 --audit-sequences 10000 --set data.limit_rows=40 "
        "--set data.sequence_length=64 --set loop.batch_rows=2 --set loop.micro_rows=2"
    ),
    "benchmarks/draft_weights.py": (
        "--families EAGLE-3 --arms shipped,on-policy,rollouts --seeds 0 --start-steps 1 --steps 1 --batch-rows 2 --answers 40 "
        "--draws 1 --limit 2 --max-new-tokens 12 --audit-tokens 500 --audit-sequences 10000 "
        "--set data.sequence_length=64 --set loop.validate_rows=2"
    ),
    "benchmarks/weight_speeds.py": (
        "--families MTP --arms shipped --seeds 0 --start-steps 1 --steps 1 --batch-rows 2 --answers 40 --draws 1 "
        "--limit 2 --max-new-tokens 12 --repeats 1 --audit-tokens 500 --audit-sequences 10000 "
        "--set data.sequence_length=64 --set loop.validate_rows=2"
    ),
    "benchmarks/moving_target.py": (
        "--first 1 --stages 1 --start-steps 1 --adapt-steps 1 --questions 40 --answer-tokens 8 --draws 1 --limit 2 "
        "--max-new-tokens 12 --audit-tokens 500 --audit-sequences 10000 --set data.sequence_length=64 "
        "--set loop.validate_rows=2 --set loop.batch_rows=2 --set loop.micro_rows=2 "
        "--target-set loop.batch_rows=2 --target-set loop.micro_rows=2 --target-set data.limit_rows=40"
    ),
    "benchmarks/weight_costs.py": (
        "--families MTP --arms 'shipped,accepted length' --rounds 2 --batch-rows 2 --set data.limit_rows=40 "
        "--set data.sequence_length=64 --set loop.validate_rows=2"
    ),
    "benchmarks/warm_starts.py": (
        "--families EAGLE-1 --arms before,both,averaged --target-steps 1 --start-steps 1 --steps 1 --rows 40 "
        "--batch-rows 2 --draws 1 --limit 2 --max-new-tokens 12 --audit-tokens 500 --audit-sequences 10000 "
        "--set data.sequence_length=64 --set loop.validate_rows=2 --target-set loop.batch_rows=2 "
        "--target-set loop.micro_rows=2 --target-set data.limit_rows=40"
    ),
    "benchmarks/ensembles.py": (
        "--members 2 --sizes 2 --settings 'soft 2' --base-steps 1 --steps 1 --limit 2 "
        "--max-new-tokens 12 --audit-tokens 500 --audit-sequences 10000 "
        "--set data.limit_rows=40 --set data.sequence_length=64 --set loop.batch_rows=2 "
        "--set loop.micro_rows=2 --set loop.validate_rows=2 --set boost.samples=8 "
        "--set boost.held_out=4 --set probe.prompts=1 --set boost.continuation=8"
    ),
    "benchmarks/merge_cost.py": "--prompts 1 --max-new-tokens 12 --members 2",
    "benchmarks/scaling.py": "--rounds 1 --steps 4 --batch-rows 2",
    "benchmarks/verify_call.py": "--tokens 1 3 --rounds 1 --context 20",
    "benchmarks/target_dtypes.py": "--target tiny --rounds 1 --count 1 --max-new-tokens 4 --tokens 1 3 --context 20",
    "benchmarks/experts.py": (
        "--nodes 1 6 --experts 8 --chosen 2 --hidden 32 --width 16 --layers 2 --rounds 2 --places 2"
    ),
    "benchmarks/samplers.py": "--tiny",
    "benchmarks/step_gpu.py": "--tiny",
    "benchmarks/suffix.py": (
        "--limit 1 --max-new-tokens 20 --ngram-documents 5 --audit-tokens 500 --audit-sequences 10000"
    ),
    "benchmarks/decode_cpu.py": "--prompts 1 --max-new-tokens 12 --rounds 1",
    "benchmarks/loss_memory.py": "--vocabulary 500 --positions 64 --hidden 16 --rounds 1",
    "benchmarks/model_families.py": "--families llama --methods medusa",
    "benchmarks/rounded_states.py": "--rows 2",
    "benchmarks/large_targets.py": "--sizes llama3-70b",
    "benchmarks/row_memory.py": "--tokens 64,2100 --hidden 16 --most-gb 0",
    "benchmarks/two_ranks.py": "--methods medusa --ways DDP",
    "benchmarks/recompute.py": "--tokens 64 --hidden 16 --layers 2 --rounds 2",
    "benchmarks/train_step.py": "--tiny --recipes eagle-tiny",
    "benchmarks/mutations": "--only T06,T22",
    "benchmarks/reliability.py": "--fast --only determinism",
    "benchmarks/smollm2.py": (
        f"{SMALL_MODEL} --file model.gguf --prompts --answers 30 --answer-tokens 16 "
        "--minutes 0.05 --limit 16 --new-tokens 16 --seeds 0 --elsewhere stdlib "
        "--audit '--audit.tokens 500 --audit.sequences 10000 --audit.max_new_tokens 8 --eval.repeats 1'"
    ),
    "benchmarks/other_decoders.py": (
        "--target tiny --drafters --method prompt-lookup --tuned none --dtype fp32 --prompts stdlib --count 2 "
        "--max-new-tokens 16 --assistant path/to/target --llama-server none --gguf none"
    ),
    "benchmarks/small_rates.py": (
        f"--out smollm2 {SMALL_MODEL} --steps 2 --longer 3 --rates 'muon 1e-2' --sizes 'medusa --medusa.heads 2'"
    ),
}
# what a script reads that another one writes
BEFORE = {"benchmarks/small_rates.py": "python benchmarks/smollm2.py --out smollm2"}
# what a draft that is cut from its target cannot have are sizes of its own
SMALL_PRUNING = [
    *SMALL_TRAINING[: SMALL_TRAINING.index("--model.layers")],
    *["--model.layers", "19", "--model.prune_rows", "1"],
    *SMALL_TRAINING[SMALL_TRAINING.index("--probe.prompts") :],
]
SMALL_BOOSTING = [*[*SMALL_TRAINING, "--boost.samples", "8", "--boost.held_out", "4"], *["--boost.continuation", "4"]]
# commands whose own work has to be made small
FEW = {
    "--determinism": ["--eval.limit", "1", "--eval.max_new_tokens", "6"],
    "llma": [*SMALL_EVAL, "--eval.max_new_tokens", "24"],  # its drafts are long
    "prune-tiny": SMALL_PRUNING,
    "boost-tiny": SMALL_BOOSTING,
    "boost-lora-tiny": SMALL_BOOSTING,
}
SERVED = ["http://localhost:8000", "http://localhost:8001"]  # with a drafter, and without
SMALL_SERVED = [
    *SMALL_AUDIT[: SMALL_AUDIT.index("--audit.sequences")],
    *SMALL_AUDIT[SMALL_AUDIT.index("--audit.sequences") + 2 :],
]
# evaluations of what has tests of its audits elsewhere
UNAUDITED = ("--samples", "--method", "--drafter")
# what a newcomer types first; `make quickstart` and its proof are the whole suite's other half
BENCHMARK = "python benchmarks/"
NOT_HERE = ("make ", "draftsmith quickstart", "pip ", "git ", "cd ", ". .venv")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def scripts(page: Path) -> list[str]:
    """Python that runs by itself; the blocks of the notebook need each other, and `test_api.py` runs them."""
    return [] if page.name == "notebook.md" else blocks(page, "python")


def commands(page: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(NOT_HERE)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: a finished run, a chat target, rows, prompts."""
    folder = tmp_path_factory.mktemp("docs")
    assert main(["train", "distill-tiny", "--out", str(folder / "runs" / "distill-tiny"), *SMALL_TRAINING]) == 0
    chat_target = Path(shutil.copytree(embedded_target(), folder / "path" / "to" / "target"))
    tokenizer = load_tokenizer(str(chat_target))
    tokenizer.chat_template = named_template("chatml")
    tokenizer.save_pretrained(chat_target)
    asked = [(f"How many legs have {n} ants?", f"{n} ants have {6 * n} legs.") for n in range(60)]
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in asked]
    pairs = [{"prompt": q, "completion": a} for q, a in asked]
    for name, rows in {"chats": chats, "domain": pairs}.items():
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shutil.copytree(ROOT / "tests" / "chats", folder / "tests" / "chats")
    write_llama(folder / "model.gguf", kind="Q8_0", max_position_embeddings=2048)
    (folder / "prompts.jsonl").write_text('{"prompt": "How many legs have two ants?"}\n' * 8)
    return folder


def read_by(recipe: str, flags: list[str]) -> list[str]:
    """Those of the flags that the recipe's method reads; others would be refused."""
    made = load_recipe(recipe).recipe
    pairs = zip(flags[::2], flags[1::2], strict=True)
    known = [pair for pair in pairs if made.record.reads_value(pair[0].removeprefix("--"), made)]
    return [word for pair in known for word in pair]


def run(line: str) -> int:
    program, verb, *rest = shlex.split(line)
    if program == "accelerate":
        words = shlex.split(line)[2:]
        if "--config_file" not in words:
            words = ["--cpu", *words]
        words = [str(ROOT / word) if word.startswith("launch/configs/") else word for word in words]
        launch = [sys.executable, "-m", "accelerate.commands.launch", *words]
        if "draftsmith.launch.cli" in words:
            extra = EXTRA[words[words.index("draftsmith.launch.cli") + 1]]
        else:
            extra = read_by(words[words.index("draftsmith.launch.train") + 1], SMALL_TRAINING)
            extra[extra.index("--loop.micro_rows") + 1] = "1"  # each of two processes has a row of the two
        return subprocess.run([*launch, *extra], env={**os.environ, "ACCELERATE_USE_CPU": "true"}).returncode
    if program == "python":
        return subprocess.run([sys.executable, str(ROOT / verb), *rest, *shlex.split(BENCHMARKS[verb])]).returncode
    assert program == "draftsmith", f"no test knows how to run {program}"
    extra = next((few for flag, few in FEW.items() if flag in rest), EXTRA.get(verb, []))
    if "--server" in rest:
        extra = [
            *SMALL_SERVED,
            *(
                ["--requests", "6", "--eval.max_new_tokens", "4", "--eval.temperatures", "[0]"]
                if verb == "eval"
                else []
            ),
        ]
    elif verb == "eval" and any(flag in rest for flag in UNAUDITED):
        extra = [*extra, "--no-audit"]
    if verb == "train":
        extra = read_by(rest[0], extra)
    return main([verb, *rest, *extra])


def start_servers(stack: ExitStack, lines: list[str], workplace: Path) -> list[str]:
    """The addresses of the two servers that a page speaks of, if it does."""
    if not any(said in line for line in lines for said in SERVED):
        return []
    target = load_target(str(workplace / "path" / "to" / "target"))
    return [stack.enter_context(serving(Engine(target, each))).url for each in (PromptLookup(), None)]


def when(page: Path) -> Any:
    name = page_name(page)
    return pytest.param(page, id=name, marks=() if name in DAILY else pytest.mark.slow)


@pytest.mark.run
@pytest.mark.parametrize("page", [when(page) for page in PAGES if commands(page) or scripts(page)])
def test_commands(page: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    if page_name(page) in DAILY:  # nothing that they do asks for answers that make sense
        for name in ("config.json", "model.safetensors"):
            shutil.copy(Path(SHALLOW, name), tmp_path / "path" / "to" / "target")
    monkeypatch.chdir(tmp_path)
    lines = [line for line in commands(page) if not line.startswith(BENCHMARK)]
    with ExitStack() as stack:
        addresses = start_servers(stack, lines, tmp_path)
        for line in lines:
            for said, real in zip(SERVED, addresses, strict=False):
                line = line.replace(said, real)
            assert run(line) == (5 if "--plant" in line else 0), line
    for number, code in enumerate(scripts(page)):
        path = tmp_path / f"block{number}.py"
        path.write_text(code)
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", sorted({line for page in PAGES for line in commands(page) if line.startswith(BENCHMARK)})
)
def test_benchmarks(line: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them trains and measures on its own: too long for every day."""
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs" / "target-chat").symlink_to(tmp_path / "path" / "to")  # what `train target-chat` would write
    monkeypatch.chdir(tmp_path)
    if (before := BEFORE.get(shlex.split(line)[1])) is not None:
        assert run(before) == 0
    assert run(line) == 0


def test_there_are_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 15


def without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", without_fences(page)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), link
        assert not anchor or anchor in anchors(other), link


@pytest.mark.parametrize("page", LINKED, ids=page_name)
def test_lines_can_be_read(page: Path) -> None:
    """Tables and code have the width that they need; sentences do not."""
    prose = [line for line in without_fences(page).splitlines() if not line.startswith(("|", "<!--"))]
    assert [line for line in prose if len(line) > LONGEST_LINE] == []


def test_first_lines_of_the_readme() -> None:
    """What a newcomer types first, and where `draftsmith` lies afterwards."""
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:15])
    for line in ("make quickstart", ". .venv/bin/activate", "make test"):
        assert line in first


def test_tour_names_what_is_there() -> None:
    """Seven files in reading order; each function that a section names is in the section's file."""
    sections = re.split(r"^## \d\. ", (ROOT / "docs" / "tour.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == 7
    for section in sections:
        path, *names = re.findall(r"`([\w./]+)`", section)
        text = (ROOT / path).read_text()
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == [], path


def test_measures_name_the_code_that_computes_them() -> None:
    """The last column of the table of measures: a file, and what in it is the definition."""
    named = re.findall(r"`([\w/]+\.py)`, `(\w+)`", (ROOT / "docs" / "evaluation.md").read_text())
    assert len(named) >= 10
    for path, name in named:
        assert re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), (path, name)


# what benchmarks/tables.py writes from a record speaks of the commit that was measured
RECORDED = re.compile(r"^<!-- (?:table|run|notes): .*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
POINTER = re.compile(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+\.py)`(?:, `([A-Za-z_]\w*)`)?")
SCRIPTS = ("benchmarks", "benchmarks/common", "benchmarks/on_gpu", "benchmarks/public_model")


def lost_pointers(text: str) -> list[str]:
    """Files, and names in them, that a page speaks of and that are not there."""
    lost = []
    for path, name in POINTER.findall(RECORDED.sub("", text)):
        if path.startswith("vllm/"):  # another project's
            continue
        places = [ROOT / path, *(ROOT / folder / path for folder in SCRIPTS)]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            lost.append(path)
        elif name and not re.search(rf"^\s*(?:(?:def|class) {name}\b|{name}\b.* = )", file.read_text(), re.MULTILINE):
            lost.append(f"{path}, {name}")
    return lost


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_pages_name_files_and_code_that_are_there(page: Path) -> None:
    """A file by its path from the root, or from `benchmarks/`; with a name behind it, what that file defines."""
    assert lost_pointers(page.read_text()) == []


def test_a_lost_pointer_is_seen() -> None:
    page = "`eval/measure/speed.py`, `interleaved`, `eval/measure/timing.py`, `interleaved`, `eval/arms.py`"
    assert lost_pointers(page) == ["eval/measure/speed.py, interleaved", "eval/arms.py"]


def test_extending_quotes_what_is_tested() -> None:
    """The records on the page are those of the throw-away family, to the letter."""
    shown = blocks(ROOT / "docs" / "extending.md", "text")
    tested = (ROOT / "tests" / "throwaway" / "bigram.py").read_text()
    assert len(shown) == 2
    for record in shown:
        assert record in tested


def test_every_family_has_its_page() -> None:
    """A record names the page that describes its family, and the guides name that page."""
    guides = "".join((ROOT / "docs" / name).read_text() for name in ("families.md", "origins.md", "methods.md"))
    for family in FAMILIES.values():
        assert (ROOT / "docs" / family.page).exists(), family.name
        assert family.page in guides or family.page in ("origins.md", "methods.md"), family.name
