"""A drafter that is replaced in an engine that runs: afterwards it drafts as the new one, and the text was never another.

What `draftsmith adapt` makes of a drafter has the same shapes and the same draft vocabulary, so an engine need not be
started again for it. For two families the version at hand has to be, and a test says why.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.server.counters import ServerCounters, read_counters
from engines.cases import CASES, KEPT_MASK, KEPT_PRODUCTS, REPLACED, Case, Trained
from engines.engine import MOST_TOKENS, NEEDED, Asked, Served, Vllm
from engines.exported import exported
from engines.findings import REPLACED_IN, Findings, counted
from engines.measured import Counts, Prompts, greedy, plain
from engines.serving import NAME, serving
from engines.test_vllm import K
from safetensors.torch import load_file, save_file

pytestmark = NEEDED
WEIGHTS = "model.safetensors"


def stale(folder: Path, out: Path, *, all_of_it: bool) -> Path:
    """A copy of an exported drafter whose weights are noise around those that were trained."""
    shutil.copytree(folder, out)
    tensors = load_file(out / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        # what is the target's own is the same before and after
        if tensor.is_floating_point() and "embed_tokens" not in name and (all_of_it or "mtp" in name):
            tensor += tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    return out


@dataclass(frozen=True)
class Replaced:
    """What vLLM did before and after, and what our own decoder does with the drafter that is put in."""

    served: Served
    ours: Counts

    @property
    def counts(self) -> tuple[int, list[int]]:
        """Of the engine, afterwards."""
        return self.served.again[0].drafts, self.served.again[0].accepted


def replaced(case: Case, run: Path, vllm: Vllm, target: Backbone, prompts: Prompts, place: Path) -> Replaced:
    """Start with noise around a run's drafter, and put the drafter itself in its place."""
    command = exported(run, case.form, place / "export")
    beside = "model" in command.greedy  # MTP modules stand in the target's own folder
    fresh = Path(command.greedy["model"] if beside else command.model)
    old = str(stale(fresh, place / "stale", all_of_it=beside))
    model, words = (command.model, command.greedy | {"model": old}) if beside else (old, command.greedy)
    served = vllm.serve(model, words, [Asked(prompts, 0.0)], command.of_target, replaced_by=fresh)
    drawn = {"policy": "argmax"} if command.samples else {}  # heads take their likeliest tokens, and no word for it
    config = DrafterConfig(**drawn, tree=case.tree)
    drafter = load_drafter(run / "drafter", target, draft_length=K, config=config)
    return Replaced(served, greedy(target, drafter, prompts, MOST_TOKENS))


def named(title: str) -> Case:
    return next(case for case in CASES if case.title == title)


@pytest.mark.parametrize("title", REPLACED)
def test_a_drafter_is_replaced(
    title: str, vllm: Vllm, target: Backbone, prompts: Prompts, trained: Trained, findings: Findings, tmp_path: Path
) -> None:
    case = named(title)
    found = replaced(case, trained(case.run), vllm, target, prompts, tmp_path)
    before, after = found.served.runs[0], found.served.again[0]
    findings.trained(title, trained(case.run) / "drafter")
    findings.add(
        REPLACED_IN,
        title,
        ours=counted(found.ours.steps, found.ours.accepted),
        before=counted(before.drafts, before.accepted),
        theirs=counted(after.drafts, after.accepted),
    )
    assert found.served.engine_class == case.engine_class
    assert before.tokens == after.tokens == plain(target, prompts, MOST_TOKENS)
    assert found.counts == (found.ours.steps, found.ours.accepted)
    assert sum(before.accepted) < sum(after.accepted)  # otherwise nothing was replaced


def test_a_server_takes_a_drafter(
    target: Backbone, prompts: Prompts, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, as the page has it."""
    run = trained("eagle3")
    command = exported(run, "vllm", tmp_path / "export")
    fresh = tmp_path / "export"
    old = stale(fresh, tmp_path / "stale", all_of_it=True)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    words = ("--worker-extension-cls", "replacing.Replacing", "--no-enable-prefix-caching")
    replace = {"method": "replace_drafter", "args": [str(fresh)]}
    counted_by = []
    with serving(tmp_path / "server", command.model, command.greedy | {"model": str(old)}, more=words) as url:
        for _ in range(2):
            earlier = counters(url)
            texts = [written(url, ids) for ids in prompts]
            counted_by.append(counters(url).since(earlier))
            httpx2.post(f"{url}/collective_rpc", json=replace, timeout=None).raise_for_status()
    before, after = counted_by
    assert before is not None
    assert after is not None
    ours = greedy(target, load_drafter(run / "drafter", target, draft_length=K), prompts, MOST_TOKENS)
    assert texts == [target.tokenizer.decode(ids) for ids in ours.tokens]
    assert (after.steps, list(after.per_position)) == (ours.steps, ours.accepted)
    assert sum(before.per_position) < sum(after.per_position)


def written(url: str, ids: Sequence[int]) -> str:
    """The greedy text behind a prompt."""
    words = {"model": NAME, "prompt": list(ids), "temperature": 0, "max_tokens": MOST_TOKENS}
    answer = httpx2.post(f"{url}/v1/completions", json=words, timeout=None).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def counters(url: str) -> ServerCounters:
    """What the server has counted since it began."""
    found = read_counters(httpx2.get(f"{url}/metrics").text)
    assert found is not None
    return found


def test_a_state_of_a_mask_stays(
    vllm: Vllm, target: Backbone, prompts: Prompts, trained: Trained, tmp_path: Path
) -> None:
    """P-EAGLE's `mask_hidden` is a buffer of a module without weights, which gets back what it had; text stays right."""
    case = named(KEPT_MASK)
    found = replaced(case, trained(case.run), vllm, target, prompts, tmp_path)
    assert found.served.again[0].tokens == found.ours.tokens
    assert found.counts != (found.ours.steps, found.ours.accepted)


def test_products_that_are_put_together_stay(
    vllm: Vllm, target: Backbone, prompts: Prompts, trained: Trained, tmp_path: Path
) -> None:
    """DFlash's weights of all layers are stacked while they are loaded, from layers that are not there yet."""
    case = named(KEPT_PRODUCTS)
    with pytest.raises(RuntimeError, match=r"_project_context_kv(?s:.*)size mismatch"):
        replaced(case, trained(case.run), vllm, target, prompts, tmp_path)
