"""Rows that the models write while they train: whose words, which labels, and after a kill too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.packed import PackedRows
from draftsmith.decoding.backbone.attention import NAME
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.errors import RequestError, Stopped
from draftsmith.trainers import distill
from draftsmith.trainers.config import (
    CheckpointConfig,
    LoopConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProbeConfig,
)
from draftsmith.trainers.loop import setup, state
from draftsmith.trainers.loop.loop import Loop, Plan
from draftsmith.trainers.method_config import RolloutsConfig
from draftsmith.trainers.teacher import rollouts as writing
from draftsmith.trainers.teacher.rollouts import (
    REPLACED,
    Rollouts,
    check_rollout_prompts,
    check_rollout_rows,
    cut_prompt,
    is_replaced,
    view_to_decode,
)
from helpers.models.learnable_text import stop_behind
from helpers.models.method_objectives import build

S, STEPS = 24, 7
SMALL = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=256)
GREEDY = RolloutsConfig(share=0.5, prompt_tokens=5, new_tokens=6, temperature=0.0)


class Words:
    """As much of a tokenizer as a fresh draft needs."""

    eos_token_id = None


class Rows:
    """Packed rows: two documents and padding, the first with a prompt that is no label."""

    def __len__(self) -> int:
        return 12

    def batch(self, rows: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.stack(
            [torch.randint(0, VOCABULARY, (S,), generator=torch.Generator().manual_seed(row)) for row in rows]
        )
        documents = torch.tensor([0] * 14 + [1] * 8 + [-1] * 2).expand_as(ids)
        positions = torch.tensor([*range(14), *range(8), 0, 1]).expand_as(ids)
        return {
            "input_ids": ids,
            "positions": positions,
            "documents": documents,
            "loss_mask": (positions >= 3) & (documents == 0) | (positions >= 1) & (documents == 1),
        }


def goal(target: Backbone, rollouts: RolloutsConfig, **objective: Any) -> distill.DistillObjective:
    torch.manual_seed(1)
    return build(
        "distill",
        target.model,
        tokenizer=Words(),
        model=SMALL,
        objective=ObjectiveConfig(**objective),
        rollouts=rollouts,
        data=DataConfig(sequence_length=24),
    )


def rollouts_of(found: distill.DistillObjective) -> Rollouts:
    assert found.rollouts is not None
    return found.rollouts


def pieces(batch: dict[str, torch.Tensor], row: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and continuation of every document of a row."""
    found = []
    for number in range(int(batch["documents"][row].max()) + 1):
        inside = batch["documents"][row] == number
        labels = batch["loss_mask"][row] & inside
        prompt = batch["input_ids"][row][inside & ~labels].tolist()
        assert torch.equal(batch["positions"][row][inside], torch.arange(int(inside.sum())))
        found.append((prompt, batch["input_ids"][row][labels].tolist()))
    return found


@pytest.mark.parametrize("by", ["student", "target", "mixed"])
def test_rows_hold_what_their_writer_says(by: str, target: Backbone) -> None:
    """Half of the rows, each with two prompts of its own text and what plain decoding adds."""
    config = GREEDY.model_copy(update={"by": by, "student_tokens": 1.0})
    made = goal(target, config)
    batches = [Rows().batch([0, 1]), Rows().batch([2, 3])]
    new = rollouts_of(made).rewrite(batches, range(4), step=0, seed=7)
    writer = target if by == "target" else Backbone(made.draft().eval(), name="draft")  # type: ignore[arg-type]
    for number, row in [(0, 0), (1, 0)]:
        assert all(torch.equal(new[number][name][row], batches[number][name][row]) for name in batches[0])
    for number, row in [(0, 1), (1, 1)]:
        gold = batches[number]["input_ids"][row].tolist()
        documents = batches[number]["documents"][row].tolist()
        found = pieces(new[number], row)
        assert len(found) == 2
        for prompt, answer in found:
            at = next(i for i in range(S) if gold[i : i + len(prompt)] == prompt)
            end = at + len(prompt)
            assert documents[at] == documents[end]
            assert bool(batches[number]["loss_mask"][row][end]), "in front of a label"
            base = autoregressive(writer, [prompt], warper=Warper(0.0), max_new_tokens=6)
            assert answer == base.tokens[0]


def test_padding_rows_of_the_draft_are_not_written(target: Backbone) -> None:
    """A draft whose projection has more rows than the target's would write ids it cannot read."""
    made = goal(target, GREEDY.model_copy(update={"share": 1.0, "temperature": 50.0}))
    draft: Any = made.draft()
    draft.resize_token_embeddings(VOCABULARY + 400)
    (new,) = rollouts_of(made).rewrite([Rows().batch([0, 1])], [0, 1], step=0, seed=7)
    answers = [answer for row in (0, 1) for _, answer in pieces(new, row)]
    assert len({token for answer in answers for token in answer}) > 2
    assert int(new["input_ids"].max()) < VOCABULARY


def test_an_end_of_text_ends_a_row(target: Backbone) -> None:
    made = goal(target, GREEDY.model_copy(update={"by": "target", "share": 1.0}))
    ends = Backbone(target.model, name="ends")
    rollouts = rollouts_of(made)
    ends.__class__ = type("Ending", (Backbone,), {"eos_ids": tuple(range(VOCABULARY))})
    rollouts._target = ends
    (new,) = rollouts.rewrite([Rows().batch([0])], [0], step=0, seed=7)
    written = list(pieces(new, 0))
    assert len(written) > 1
    assert new[REPLACED].all()
    for prompt, answer in written:
        assert prompt
        assert len(answer) == 1


def test_the_same_rows_are_used_again(target: Backbone) -> None:
    config = GREEDY.model_copy(update={"every_steps": 3, "temperature": 1.0})
    rollouts = rollouts_of(goal(target, config))
    seen = [rollouts.rewrite([Rows().batch([step, step + 1])], [0, 1], step=step, seed=step)[0] for step in range(4)]
    for name in seen[0]:
        assert all(torch.equal(seen[0][name][1], seen[step][name][1]) for step in (1, 2))
    assert not torch.equal(seen[0]["input_ids"][1], seen[3]["input_ids"][1])
    assert not torch.equal(seen[0]["input_ids"][0], seen[1]["input_ids"][0]), "the data goes on"


def test_a_row_does_not_feel_its_process(target: Backbone) -> None:
    """Rows split over two processes are written as in one."""
    config = GREEDY.model_copy(update={"share": 1.0, "temperature": 1.0})
    rollouts = rollouts_of(goal(target, config))
    (whole,) = rollouts.rewrite([Rows().batch([0, 1, 2, 3])], range(4), step=0, seed=9)
    parts = []
    for rank in (0, 1):
        mine = [0, 1, 2, 3][rank::2]
        (part,) = rollouts.rewrite([Rows().batch(mine)], range(rank, 4, 2), step=0, seed=9)
        parts.append(rollouts.kept)
        for name, t in part.items():
            assert torch.equal(t, whole[name][rank::2]), name
    joined = rollouts.of_all(parts)  # type: ignore[arg-type]
    assert torch.equal(joined["input_ids"], whole["input_ids"])
    rollouts.recall(joined, 1, 2)
    assert rollouts.kept is not None
    assert torch.equal(rollouts.kept["input_ids"], whole["input_ids"][1::2])


def test_a_row_without_a_label_stays(target: Backbone) -> None:
    rollouts = rollouts_of(goal(target, GREEDY.model_copy(update={"share": 1.0})))
    batch = Rows().batch([0, 1])
    batch["loss_mask"][1] = False
    (new,) = rollouts.rewrite([batch], [0, 1], step=0, seed=1)
    assert torch.equal(new["input_ids"][1], batch["input_ids"][1])
    assert not new["loss_mask"][1].any()
    assert not torch.equal(new["input_ids"][0], batch["input_ids"][0])


def test_prompts_are_cut_at_every_label() -> None:
    """All chances against the definition: the tokens before a label, inside its document; those of
    the chat, whose first three are a prompt, from its beginning on."""
    rows = Rows().batch([0])
    ids, mask = rows["input_ids"][0].tolist(), rows["loss_mask"][0].tolist()
    labels = [at for at in range(S) if mask[at] and not 5 < at < 14]
    wanted = [ids[0 if end < 14 else max(end - 5, 14) : end] for end in labels]
    count = len(labels)
    assert [cut_prompt(rows, 0, (k + 0.5) / count, 5) for k in range(count)] == wanted
    assert cut_prompt(rows, 0, 0.999999, 5) == wanted[-1]


def packed(*prompts: int) -> PackedRows:
    """A chat of 12 tokens in each row, of which so many are its prompt."""
    in_loss_RS = np.arange(12) >= np.array(prompts)[:, None]
    ids_RS = np.arange(12 * len(prompts), dtype=np.int32).reshape(-1, 12)
    return PackedRows(ids_RS, in_loss_RS, np.zeros_like(ids_RS), "chats")


def test_chats_too_long_for_a_prompt_stay(target: Backbone, caplog: pytest.LogCaptureFixture) -> None:
    """One of three chats has an answer within five tokens; it alone is written anew."""
    config, rows = GREEDY.model_copy(update={"share": 1.0}), packed(7, 4, 11)
    caplog.set_level("INFO")
    check_rollout_prompts(config, rows)
    assert "33% of the rows hold a prompt of at most rollouts.prompt_tokens = 5" in caplog.text
    batch = rows.batch(range(3))
    (new,) = rollouts_of(goal(target, config)).rewrite([batch], range(3), step=0, seed=2)
    assert [torch.equal(new["input_ids"][k], batch["input_ids"][k]) for k in range(3)] == [True, False, True]
    found = pieces(new, 1)
    assert all(prompt == batch["input_ids"][1, : len(prompt)].tolist() for prompt, _ in found)
    with pytest.raises(RequestError, match="none of 2 rows has an answer within"):
        check_rollout_prompts(config, packed(7, 11))


@pytest.mark.parametrize("share", [0.1, 0.25, 1 / 3, 0.5, 0.7, 1.0])
def test_as_many_rows_as_asked_for_spread_evenly(share: float) -> None:
    chosen = [is_replaced(place, share) for place in range(60)]
    assert abs(sum(chosen) - share * 60) <= 1
    gaps = [place for place in range(60) if chosen[place]]
    widths = {later - earlier for earlier, later in zip(gaps, gaps[1:])}
    assert max(widths) - min(widths) <= 1


@pytest.mark.parametrize(
    ("share", "rows"), [(1 / 3, 3), (0.3333, 3), (1 / 7, 7), (1 / 30, 30), (0.1, 10), (0.1429, 7), (0.0334, 30)]
)
def test_a_share_that_is_one_row_writes_one_row(share: float, rows: int) -> None:
    check_rollout_rows(GREEDY.model_copy(update={"share": share}), 24, rows)
    assert sum(is_replaced(place, share) for place in range(rows)) == 1


@pytest.mark.parametrize("rows", [3, 7, 9, 12, 27, 256])
def test_the_share_that_the_refusal_advises_is_taken(rows: int) -> None:
    with pytest.raises(RequestError, match="less than one of") as refused:
        check_rollout_rows(GREEDY.model_copy(update={"share": 0.5 / rows}), 24, rows)
    advised = float(str(refused.value).split("take ")[1].split()[0])
    check_rollout_rows(GREEDY.model_copy(update={"share": advised}), 24, rows)


def test_the_view_follows_the_weights() -> None:
    """Decoding sees every step of the optimiser, and training keeps its own attention."""
    model: Any = make_target("qwen3").model.train()
    before = model.config._attn_implementation
    view: Any = view_to_decode(model)
    assert view.config._attn_implementation == NAME
    assert model.config._attn_implementation == before
    assert model.training
    assert not view.training
    for mine, theirs in zip(model.parameters(), view.parameters(), strict=True):
        assert mine is theirs
    kv_cache = KVCache(1, 8)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
        seen = Backbone(view, name="view").prefill([[1, 2, 3]], kv_cache)
        torch.testing.assert_close(seen[0], model(torch.tensor([[1, 2, 3]])).logits[0, -1])


def test_rows_that_have_no_room_are_refused() -> None:
    with pytest.raises(RequestError, match=r"= 11, and a row has data.sequence_length = 10"):
        check_rollout_rows(GREEDY, 10, 8)
    with pytest.raises(RequestError, match=r"less than one of loop.batch_rows = 4; take 0.25"):
        check_rollout_rows(GREEDY.model_copy(update={"share": 0.2}), 24, 4)
    check_rollout_rows(GREEDY.model_copy(update={"share": 0.0, "prompt_tokens": 99}), 24, 4)


def train(out: Path, target: Backbone, config: RolloutsConfig, stop_at: int | None = None) -> Any:
    """A run through the loop, perhaps told to stop behind a step."""
    plan = Plan(
        LoopConfig(
            steps=STEPS, batch_rows=4, micro_rows=2, precision="fp32", validate_rows=2, validate_every=3, log_every=1
        ),
        OptimizerConfig(lr=3e-3, warmup_steps=1),
        CheckpointConfig(every_steps=4),
        ProbeConfig(),
    )
    out.mkdir(parents=True, exist_ok=True)
    setup.make_deterministic(plan.loop)
    accelerator = setup.make_accelerator(plan.loop, plan.optimizer, out)
    made = goal(target, config, tv=1.0, kl=0.0)
    loop = Loop(made, Rows(), Rows(), plan, accelerator, out=out, export_to=out / "drafter", probe=None)
    stop_behind(loop, stop_at)
    loop.run(setup.resume_from(out, "auto"))
    return {name: t.clone() for name, t in state.trainable(made.module).items()}


@pytest.mark.parametrize("by", ["student", "mixed"])
def test_every_cut_resumes_to_the_same_bits(by: str, target: Backbone, tmp_path: Path) -> None:
    """Also between two steps that train on the same rows, written by weights that are gone."""
    config = GREEDY.model_copy(update={"temperature": 1.0, "every_steps": 3, "by": by})
    wanted = train(tmp_path / "whole", target, config)
    for cut in (2, 3, 5):
        out = tmp_path / f"cut-{cut}"
        with pytest.raises(Stopped):
            train(out, target, config, stop_at=cut)
        found = train(out, target, config)
        assert all(torch.equal(found[name], t) for name, t in wanted.items()), cut
    plain = train(tmp_path / "plain", target, config.model_copy(update={"share": 0.0}))
    assert any(not torch.equal(plain[name], t) for name, t in wanted.items())


def test_every_step_draws_other_numbers_and_a_repeated_one_the_same(
    target: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop hands every step a seed of its own, which follows from the run's seed and the step."""
    seeds: list[int] = []
    rewrite = Rollouts.rewrite

    def noted(self: Rollouts, batches: Any, places: Any, step: int, seed: int) -> Any:
        seeds.append(seed)
        return rewrite(self, batches, places, step, seed)

    monkeypatch.setattr(Rollouts, "rewrite", noted)
    for name in ("one", "again"):
        train(tmp_path / name, target, GREEDY)
    assert len(seeds) == 2 * STEPS
    assert len(set(seeds[:STEPS])) == STEPS
    assert seeds[:STEPS] == seeds[STEPS:]


def test_metrics_say_what_writing_costs(target: Backbone, tmp_path: Path) -> None:
    train(tmp_path / "run", target, GREEDY)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count('"rollout_share"') == STEPS
    train(tmp_path / "plain", target, GREEDY.model_copy(update={"share": 0.0}))
    assert "rollout_share" not in (tmp_path / "plain" / "metrics.jsonl").read_text()


def test_pieces_of_rows_draw_numbers_and_prompts_of_their_own(
    target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces a row, four rows, two processes: no stream has two pieces, and pieces of a row begin elsewhere."""
    streams: list[int] = []

    class Noted(Uniforms):
        def __init__(self, seed: int, requests: list[int], device: Any) -> None:
            streams.extend(requests)
            super().__init__(seed, requests, device)

    monkeypatch.setattr(writing, "Uniforms", Noted)
    rollouts = rollouts_of(goal(target, GREEDY.model_copy(update={"share": 1.0})))
    prompts = []
    for rank in (0, 1):
        rollouts.kept = None
        places = range(rank, 4, 2)
        (new,) = rollouts.rewrite([Rows().batch(list(places))], places, step=0, seed=3)
        prompts += [[prompt for prompt, _ in pieces(new, row)] for row in range(2)]
    each = len(prompts[0])
    assert each > 1
    assert len(set(streams)) == len(streams) == 4 * each
    assert sum(first != second for first, second, *_ in prompts) >= 3
