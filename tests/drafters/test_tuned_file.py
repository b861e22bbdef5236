"""`tuned.json`: what is read is what was written, and nothing that is no drafter's value."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.tuned_file import read_tuned, write_tuned
from draftsmith.errors import RequestError

VALUES = {"eval.draft_length": "3", "drafter.policy": "argmax"}


def test_there_and_back(tmp_path: Path) -> None:
    assert read_tuned(tmp_path).values == {}
    write_tuned(tmp_path, VALUES, {"pays": True})
    assert read_tuned(tmp_path).values == VALUES


@pytest.mark.parametrize("family", [name for name, record in FAMILIES.items() if record.grids])
def test_whatever_tuning_may_choose_is_read_again(family: str, tmp_path: Path) -> None:
    for grid in FAMILIES[family].grids:
        for size in grid.sizes:
            write_tuned(tmp_path, grid.values(size), {})
            assert read_tuned(tmp_path).values == grid.values(size)


def test_a_flag_of_its_kind_turns_all_of_it_off(tmp_path: Path) -> None:
    """A tree's depth with a chain's policy is a setting that nobody measured."""
    write_tuned(tmp_path, VALUES, {"temperature": 0.0, "batch": 8, "processor": "a machine"})
    tuned = read_tuned(tmp_path)
    assert tuned.measured == "T = 0.0, batch 8, a machine"
    assert tuned.unless(["eval.limit", "loop.steps"]).values == VALUES
    assert tuned.unless(["drafter.tree"]).values == {}
    assert tuned.unless(["eval.draft_length"]).values == {}


@pytest.mark.parametrize(
    ("values", "chain"),
    [
        ({"eval.draft_length": "3"}, True),
        ({"eval.draft_length": "3", "drafter.eagle.tree": "chain", "drafter.tree": "default"}, True),
        ({"eval.draft_length": "3", "drafter.tree": "chain"}, True),
        ({"drafter.medusa.nodes": "8", "drafter.tree": "default"}, False),
        ({"eval.draft_length": "5", "drafter.eagle.tree": "dynamic", "drafter.eagle.nodes": "16"}, False),
    ],
)
def test_which_settings_an_engine_can_have(values: dict[str, str], chain: bool, tmp_path: Path) -> None:
    write_tuned(tmp_path, values, {})
    assert read_tuned(tmp_path).is_chain is chain


def test_draft_temperatures_are_kept_and_shown_as_a_flag(tmp_path: Path) -> None:
    """As words that a shell takes for one value; the target's own are nothing to say."""
    for factors, shown in (("[0.9, 1.1]", " --drafter.temperature_factors '[0.9, 1.1]'"), ("[]", "")):
        write_tuned(tmp_path, {"eval.draft_length": "3", "drafter.temperature_factors": factors}, {})
        tuned = read_tuned(tmp_path)
        assert tuned.shown == f"--eval.draft_length 3{shown}"
        assert tuned.is_chain


@pytest.mark.parametrize(
    ("facts", "plain"),
    [
        ({"pays": False, "plain": True}, True),
        ({"pays": True, "plain": False}, False),  # the recipe's own setting is the fastest
        ({"pays": False, "plain": False}, False),  # it is not told apart from plain decoding
        ({"pays": False}, True),  # before `plain` was kept
        ({"pays": True}, False),
        ({}, False),
    ],
)
def test_no_values_do_not_mean_that_nothing_pays(facts: dict[str, bool], plain: bool, tmp_path: Path) -> None:
    write_tuned(tmp_path, {}, facts)
    assert read_tuned(tmp_path).plain is plain
    assert not read_tuned(tmp_path / "untuned").plain


@pytest.mark.parametrize(
    ("facts", "hope"),
    [
        ({}, ""),
        ({"pays_from": None}, " (it would pay at no cost of a target call)"),
        ({"pays_from": 1.5}, " (it would pay from a target call 1.50 times the one measured)"),
        (
            {"pays_from": 1.5, "target_call_seconds": 0.02},
            " (it would pay from a target call of 30 ms, 1.50 times the one measured)",
        ),
        ({"pays_from": "a lot", "target_call_seconds": []}, " (it would pay at no cost of a target call)"),
    ],
)
def test_where_none_pays_it_is_said_from_where_on(facts: dict[str, object], hope: str, tmp_path: Path) -> None:
    known = {"temperature": 0.0, "batch": 1, "processor": "here", "pays": False, "plain": True}
    write_tuned(tmp_path, {}, known | facts)
    said = read_tuned(tmp_path).none_pays("so what")
    assert said == f"tuning found nothing faster than plain decoding for T = 0.0, batch 1, here{hope}; so what"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 9, "settings": {}}', "format is 9"),
        ('{"format": 1, "settings": {"loop.steps": "3"}}', "sets"),
        ('{"format": 1, "settings": {"eval.draft_length": "-3"}}', "sets"),
        ('{"format": 1, "settings": {"drafter.policy": 3}}', "sets"),
        ('{"format": 1, "settings": {"drafter.temperature_factors": "[0.9, x]"}}', "sets"),
        ('{"format": 1, "settings": []}', "sets"),
        ('{"format": 1, "settings": {"eval.draft_length": "3"}, "plain": true}', "with plain True"),
        ('{"format": 1, "settings": {}, "plain": "no"}', "with plain 'no'"),
    ],
)
def test_what_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(RequestError, match=message) as refused:
        read_tuned(tmp_path)
    assert "tuned.json" in str(refused.value)
    assert "draftsmith tune" in str(refused.value)


@pytest.mark.parametrize("family", [each.name for each in FAMILIES.values() if each.grids])
def test_whatever_tune_chooses_is_read_again(family: str, tmp_path: Path) -> None:
    for grid in FAMILIES[family].grids:
        values = grid.values(grid.sizes[-1])
        write_tuned(tmp_path, values, {})
        assert read_tuned(tmp_path).values == values
