"""Bugs of data, evaluation and commands: labels, line numbers, cache keys, measures, verdicts.

Read next: `planting.py`.
"""

from __future__ import annotations

from draftsmith.benchmarks.mutations.mutation import Mutation

AUDIT = "tests/eval/audit/test_audit.py::"
LINES = "tests/data/rows/test_readers.py::test_a_row_is_named_by_the_line_where_it_begins"
MARKS = "tests/data/rows/test_templates.py::test_prefixes_find_what_marks_mark"
METRICS = "tests/eval/measure/test_metrics.py::"
ROUNDS = "tests/eval/measure/test_rounds.py::"
VERDICTS = "tests/launch/measure/test_run.py::test_each_arm_has_the_verdict_of_its_own_audit"

MUTATIONS = (
    Mutation(
        "T02",
        "data/rows/packed.py",
        "the first token of a document counts as a label",
        "& ~first & (documents >= 0),\n",
        "& (documents >= 0),\n",
        ("tests/data/rows/test_packed.py::test_nothing_is_lost_or_mixed",),
    ),
    Mutation(
        "A01a",
        "data/rows/templates.py",
        "chats without marks: the header of an answer counts",
        "        return self._render(chat, chat.messages[:at], template=None, answer_next=answer_next)\n",
        "        return self._render(chat, chat.messages[:at], template=None, answer_next=False)\n",
        (MARKS,),
    ),
    Mutation(
        "A01b",
        "data/rows/chats/turns.py",
        "chats without marks: an answer in the middle counts on to the end of the next turn",
        "else template.write(chat, chat.messages[: at + 1])\n",
        "else template.write(chat, chat.messages[: at + 2])\n",
        ("tests/data/rows/test_thoughts_and_marks.py::test_an_answer_in_the_middle_ends_in_front_of_the_next_turn",),
    ),
    Mutation(
        "A02b",
        "data/rows/packed.py",
        "positions do not begin anew with a document",
        "    return index_RS - start_RS, first_RS\n",
        "    return index_RS + 0 * start_RS, first_RS\n",
        ("tests/data/rows/test_packed.py::test_nothing_is_lost_or_mixed",),
    ),
    Mutation(
        "A03a",
        "data/rows/csv_rows.py",
        "CSV: a row is named by the line where it ends",
        "                yield RawRow(file, line, dict(zip(header, fields)))\n",
        "                yield RawRow(file, lines._number, dict(zip(header, fields)))\n",
        (LINES + "[quoted line ends .csv]",),
    ),
    Mutation(
        "A03b",
        "data/rows/readers.py",
        "JSONL: blank lines are not counted",
        "    while line := stream.readline(MAX_ROW_BYTES + 1):\n        number += 1\n",
        "    while line := stream.readline(MAX_ROW_BYTES + 1):\n        number += bool(line.strip())\n",
        (LINES + "[blank lines .jsonl]",),
    ),
    Mutation(
        "A04a",
        "data/rows/cache.py",
        "the key of tokenised rows knows no tokenizer",
        '        "tokenizer": tokenizer_hash(tokenizer),\n',
        '        "tokenizer": None,\n',
        ("tests/data/rows/test_sources.py::test_the_cache_knows_everything_that_shaped_it",),
    ),
    Mutation(
        "A04b",
        "data/rows/tokenizer.py",
        "the key of tokenised rows knows no chat template of the tokenizer",
        "tokenizer.special_tokens_map, template, type(tokenizer)",
        "tokenizer.special_tokens_map, type(tokenizer)",
        ("tests/data/rows/test_sources.py::test_the_cache_knows_everything_that_shaped_it",),
    ),
    Mutation(
        "E01",
        "eval/measure/metrics.py",
        "the bootstrap draws numerators and denominators apart",
        "statistic, paired=True,",
        "statistic, paired=False,",
        (METRICS + "test_the_interval_is_as_wide_as_the_error_and_as_steady_as_its_resamples",),
    ),
    Mutation(
        "E01b",
        "eval/measure/metrics.py",
        "the bootstrap draws steps in place of requests",
        "    rng = np.random.default_rng(seed)\n",
        "    steps_R = np.maximum(bottom_R.astype(int), 1)\n"
        "    top_R, bottom_R = np.repeat(top_R / steps_R, steps_R), np.repeat(bottom_R / steps_R, steps_R)\n"
        "    rng = np.random.default_rng(seed)\n",
        (METRICS + "test_the_interval_is_as_wide_as_the_error_and_as_steady_as_its_resamples",),
    ),
    Mutation(
        "E02",
        "eval/measure/metrics.py",
        "tau counts the prefill's token",
        "                emitted=int(kept_TB[use_T, row].sum()),\n",
        "                emitted=1 + int(kept_TB[use_T, row].sum()),\n",
        (METRICS + "test_counts_of_a_log_made_by_hand",),
    ),
    Mutation(
        "E03a",
        "eval/measure/rounds.py",
        "the baseline is always timed on the first batch's prompts",
        "            base = autoregressive(target, ids, **common)\n",
        "            base = autoregressive(target, [each.ids for each in requests[: len(ids)]], **common)\n",
        (ROUNDS + "test_each_batch_is_timed_on_its_own_prompts",),
    ),
    Mutation(
        "E03b",
        "eval/measure/rounds.py",
        "speed-up: answers of unlike length are compared by their seconds",
        "return base_G * tokens_G / base_tokens_G, own_G",
        "return base_G, own_G",
        (ROUNDS + "test_a_speed_up_is_per_token",),
    ),
    Mutation(
        "E04",
        "eval/audit/rosenblatt.py",
        "the audit's transforms order the vocabulary by p alone",
        "    gain_MV = p_MV - q_MV\n",
        "    gain_MV = p_MV\n",
        (AUDIT + "test_transforms_are_uniform_under_the_distribution_and_not_under_another",),
    ),
    Mutation(
        "E05a",
        "eval/report/report.py",
        "the report's verdict is the first row's, not the worst",
        '    verdicts = {row["verdict"] for row in rows}\n',
        '    verdicts = {rows[0]["verdict"]}\n',
        ("tests/eval/report/test_report.py::test_a_failed_audit_is_not_hidden",),
    ),
    Mutation(
        "E05b",
        "launch/measure/run.py",
        "the first drafter is audited in every arm's place",
        "    reports = {name: audit_pair(pair, prompts, out, console, name) for name in arms}\n",
        "    reports = {name: audit_pair(pair, prompts, out, console, next(iter(arms))) for name in arms}\n",
        (VERDICTS,),
    ),
    Mutation(
        "E05c",
        "launch/measure/run.py",
        "audits are right, and every arm carries the first one's verdict",
        "replace(arm, verdict=reports[name].verdict,",
        "replace(arm, verdict=next(iter(reports.values())).verdict,",
        (VERDICTS,),
    ),
    Mutation(
        "E06",
        "eval/audit/audit.py",
        "each of the audit's tests has the whole level to itself",
        "        if made[name] > FALSE_ALARM * SHARES[name] / left:\n",
        "        if made[name] > FALSE_ALARM:\n",
        (AUDIT + "test_four_small_p_values_are_no_failure_where_one_would_be",),
    ),
    Mutation(
        "E07",
        "eval/measure/rounds.py",
        "acceptance is added up over all repeats",
        "        if first:\n            self.counts += counts_of(own.steps)\n",
        "        self.counts += counts_of(own.steps)\n        if first:\n",
        (ROUNDS + "test_a_repeat_is_added_to_its_batch",),
    ),
    Mutation(
        "I1",
        "data/rows/report.py",
        "a message about bad rows names neither file nor line",
        'shown = [f"  {each.file}:{each.line}: {each.reason}" for',
        'shown = [f"  {each.reason}" for',
        ("tests/data/rows/test_malformed.py::test_one_clear_message[cut_off_line]",),
    ),
    Mutation(
        "I3",
        "eval/measure/metrics.py",
        "intervals are three times as wide",
        "    return Interval(value, float(bounds.low), float(bounds.high))\n",
        "    return Interval(value, 3 * float(bounds.low) - 2 * value, 3 * float(bounds.high) - 2 * value)\n",
        (METRICS + "test_the_interval_is_as_wide_as_the_error_and_as_steady_as_its_resamples",),
    ),
    Mutation(
        "I4",
        "eval/measure/metrics.py",
        "intervals of 30 resamples",
        "n_resamples=resamples, confidence_level=level",
        "n_resamples=30, confidence_level=level",
        (METRICS + "test_the_interval_is_as_wide_as_the_error_and_as_steady_as_its_resamples",),
    ),
)
