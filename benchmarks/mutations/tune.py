"""Bugs of `eval/tune`: what settings are predicted to give, how they are raced, and where each pays.

Read next: `planting.py`.
"""

from __future__ import annotations

from draftsmith.benchmarks.mutations.mutation import bugs_of

FOLDER = "tests/eval/tune/"
PREDICTIONS = (FOLDER + "test_predictions.py", FOLDER + "test_profile.py")
SURFACES = (FOLDER + "test_surface_points.py", FOLDER + "test_surfaces.py")

_PROFILE = bugs_of(
    "eval/tune/profile.py",
    PREDICTIONS,
    (
        "PE20",
        "break-even: plain decoding's time is of one row",
        "measured.token_seconds * rows - call",
        "measured.token_seconds - call",
    ),
    (
        "PE21",
        "draft temperatures: what a depth gains is not handed to the depths behind it",
        "heat.gain_D[:size].cumprod()",
        "heat.gain_D[:size]",
    ),
    ("PC15", "verify calls are timed at one row", "rows=config.batch, text=text", "rows=1, text=text"),
    (
        "PC16",
        "seconds of a step are those of a batch",
        "step_seconds=sum(run.seconds_G) / calls",
        "step_seconds=sum(run.seconds_G) / len(run.seconds_G)",
    ),
    (
        "WU01",
        "tokens of a step are tau, whatever rows there are",
        "tokens_per_step=sum(run.tokens_G) / calls",
        "tokens_per_step=sum(each.emitted for each in run.counts) / steps",
    ),
    (
        "WU02",
        "plain decoding's seconds over our tokens",
        "max(1.0, sum(run.baseline_tokens_G))",
        "max(1.0, sum(run.tokens_G))",
    ),
    (
        "WU03",
        "accepted depths are shares of the first request's steps",
        "accepted_D=_accepted(run.counts) / steps",
        "accepted_D=_accepted(run.counts) / run.counts[0].steps",
    ),
    (
        "WU04",
        "costs are measured behind the prompt alone",
        "for each in requests])) + config.max_new_tokens // 2",
        "for each in requests]))",
    ),
    ("WU05", "costs are measured behind the longest prompt", "np.median([", "np.max(["),
    ("WU06", "the context of costs is not cut to the target's", "context=min(middle, longest)", "context=middle"),
    (
        "WU07",
        "gains make a depth more than certain",
        "np.minimum(1, measured.accepted_D * ",
        "np.maximum(0, measured.accepted_D * ",
    ),
    (
        "WU08",
        "a warmer chain has its rows' tokens counted without them",
        "per_step = measured.tokens_per_step * tau / measured.tau",
        "per_step = tau",
    ),
    (
        "WU09",
        "the smallest and the largest of a grid alone are decoded",
        "{grid.sizes[0], grid.sizes[len(grid.sizes) // 2], grid.sizes[-1]}",
        "{grid.sizes[0], grid.sizes[-1]}",
    ),
    (
        "WU11",
        "draft temperatures are looked for on the shortest chain",
        "contender.load(grid.values(grid.sizes[-1]))",
        "contender.load(grid.values(grid.sizes[0]))",
    ),
    (
        "WU12",
        "draft temperatures are looked for at T = 1",
        "warper = Warper.of(bench.config, bench.temperature)",
        "warper = Warper.of(bench.config, 1.0)",
    ),
    (
        "WU13",
        "the rest of a step between sizes is that of the smaller one",
        "step_seconds=rest + _verify_seconds(nodes, costs)",
        "step_seconds=points[0].step_seconds",
    ),
    (
        "WU14",
        "rows that have ended are forgotten between sizes",
        "tokens_per_step=tau * line([each.tokens_per_step / each.tau for each in points])",
        "tokens_per_step=tau",
    ),
    (
        "WU15",
        "tau of a tree on a line over its nodes",
        "np.interp(np.log(size), np.log(sizes), ",
        "np.interp(size, sizes, ",
    ),
    (
        "WU16",
        "a chain between sizes accepts as the longest one does",
        "longer = min((each for each in points if each.size > size), key=lambda each: each.size)",
        "longer = points[-1]",
    ),
    (
        "WU17",
        "a chain is held to the longer one at one end alone",
        "ends = [shorter.tau / of_longer(shorter.size), longer.tau / of_longer(longer.size)]",
        "ends = [1.0, longer.tau / of_longer(longer.size)]",
    ),
    (
        "WU18",
        "the rest of a step counts its verify call as well",
        "rest = measured.step_seconds / call - costs.verify(measured.nodes)",
        "rest = measured.step_seconds / call",
    ),
    (
        "WU19",
        "speed-up by tau in place of tokens a step",
        "speedup = measured.tokens_per_step * measured.token_seconds",
        "speedup = measured.tau * measured.token_seconds",
    ),
    (
        "WU20",
        "break-even: what surrounds plain decoding's calls is forgotten",
        "(rest - measured.tau * around) / gained",
        "rest / gained",
    ),
    ("WU21", "break-even may be below nothing", "return max(0.0, (rest", "return max(-1.0, (rest"),
    (
        "WU22",
        "tau as large as the verify call's cost pays somewhere",
        "if gained > 0 else None",
        "if gained > -1e-9 else None",
    ),
    (
        "WU23",
        "the token's seconds between sizes are the first one's",
        "token_seconds=line([each.token_seconds for each in points])",
        "token_seconds=points[0].token_seconds",
    ),
    (
        "WU24",
        "nodes between sizes are the size",
        "        nodes=nodes,\n        step",
        "        nodes=size,\n        step",
    ),
)
_RACE = bugs_of(
    "eval/tune/race.py",
    (FOLDER + "test_race_looks.py", FOLDER + "test_race.py"),
    ("PE22", "intervals hold for all looks, not for all settings", "(len(looks) * len(predictions))", "len(looks)"),
    (
        "PE23",
        "intervals hold for all settings, not for all looks",
        "(len(looks) * len(predictions))",
        "len(predictions)",
    ),
    (
        "WU30",
        "every look decodes from the first prompt on",
        "requests[before * config.batch : batches * config.batch]",
        "requests[: batches * config.batch]",
    ),
    (
        "WU31",
        "looks count requests, not batches",
        "looks_at(-(-len(requests) // config.batch))",
        "looks_at(len(requests))",
    ),
    (
        "WU32",
        "a rest that fills no batch is left out",
        "looks_at(-(-len(requests) // config.batch))",
        "looks_at(len(requests) // config.batch)",
    ),
    ("WU33", "what fell behind is decoded on", "if not is_behind(done[at], done.values())}", "}"),
    (
        "WU34",
        "a look forgets the looks before it",
        "running[at][1].extend(run)\n            done[at] = _raced(predictions[at], running[at][1], config, level)",
        "done[at] = _raced(predictions[at], run, config, level)",
    ),
    (
        "WU35",
        "measuring goes on when all is decided",
        "if is_decided([done[at] for at in running]):",
        "if not running:",
    ),
    (
        "WU36",
        "measuring ends when one is left, clear of 1 or not",
        "return len(left) == 1 and left[0].pays",
        "return len(left) == 1",
    ),
    ("WU37", "none can pay as soon as one cannot", "if all(each.speedup.high < 1", "if any(each.speedup.high < 1"),
    (
        "WU38",
        "behind by values, not by intervals",
        "raced.speedup.high < other.speedup.low",
        "raced.speedup.value < other.speedup.low",
    ),
    (
        "WU39",
        "a setting pays where its value is above 1",
        "return self.speedup.low > 1",
        "return self.speedup.value > 1",
    ),
    (
        "WU40",
        "of level settings the prediction alone chooses",
        "key=lambda each: each.prediction.speedup * each.speedup.value",
        "key=lambda each: each.prediction.speedup",
    ),
    (
        "WU41",
        "of level settings the measurement alone chooses",
        "key=lambda each: each.prediction.speedup * each.speedup.value",
        "key=lambda each: each.speedup.value",
    ),
    ("WU42", "the slowest first", "key=lambda each: -each.speedup.value", "key=lambda each: each.speedup.value"),
    ("WU43", "intervals of the usual 2,000 resamples", "_RESAMPLES = 10_000", "_RESAMPLES = 2_000"),
    ("WU44", "looks begin behind three batches", "FEWEST = 6\n", "FEWEST = 3\n"),
    (
        "WU45",
        "requests that were measured are counted as batches",
        "speedup, tau, len(run.counts))",
        "speedup, tau, len(run.seconds_G))",
    ),
)
_REST = (
    *bugs_of(
        "eval/tune/surfaces.py",
        SURFACES,
        (
            "PE27",
            "all points of the batch surface have the recipe's batch",
            "step.ratio(_rows(ids, b))) for b in _BATCHES",
            "step.ratio(_rows(ids, config.batch))) for b in _BATCHES",
        ),
        (
            "PE24",
            "temperatures: tau of the temperature that was tuned for",
            "(T, step.tau_at(T, requests) * here)",
            "(T, step.tau_at(temperature, requests) * here)",
        ),
        ("WU50", "the slower of two rounds counts", "return min(plain) / min(own)", "return max(plain) / max(own)"),
        ("WU51", "our step over plain decoding's", "return min(plain) / min(own)", "return min(own) / min(plain)"),
        (
            "WU52",
            "contexts are timed with one row",
            "_rows([_long(ids, length)], config.batch)",
            "_rows([_long(ids, length)], 1)",
        ),
        (
            "WU53",
            "contexts: all of the prompts' text, whatever the length",
            "step.ratio(_rows([_long(ids, length)], config.batch))",
            "step.ratio(_rows([_long(ids, 32)], config.batch))",
        ),
        (
            "WU54",
            "seconds of a step are those of all steps",
            "return done.decode_seconds / max(1, done.target_calls)",
            "return done.decode_seconds",
        ),
        (
            "WU55",
            "steps are timed at T = 0",
            '"warper": self._warper(self._temperature)',
            '"warper": self._warper(0.0)',
        ),
        (
            "WU56",
            "the temperature surface is timed with one row",
            "here = step.ratio(_rows(ids, config.batch))",
            "here = step.ratio(_rows(ids, 1))",
        ),
        (
            "WU57",
            "a context that leaves no room for a step is tried",
            "room = target.context - _TOKENS - drafter.nodes - 1",
            "room = target.context",
        ),
        (
            "WU58",
            "answers that are timed may be shorter than a draft",
            "max(_TOKENS, self._drafter.draft_length + 2)",
            "_TOKENS",
        ),
        (
            "WU59",
            "a crossing is the point before it",
            "found.append(back(scale(x0) + share * (scale(x1) - scale(x0))))",
            "found.append(x0)",
        ),
        (
            "WU60",
            "crossings of a logarithmic axis on a line",
            "scale, back = (log, exp) if self.axis in LOGARITHMIC else (float, float)",
            "scale, back = float, float",
        ),
        (
            "WU61",
            "only where it falls below 1 does a surface cross it",
            "if (y0 >= 1) != (y1 >= 1):",
            "if y0 >= 1 > y1:",
        ),
        ("WU62", "tau of answers that go on behind their end", "            eos_ids=self._target.eos_ids,\n", ""),
        (
            "WU63",
            "requests of the temperature surface draw the numbers of others",
            "requests=[each.number for each in requests]",
            "requests=range(len(requests))",
        ),
    ),
    *bugs_of(
        "eval/tune/temperatures.py",
        FOLDER + "test_temperatures.py",
        (
            "WU70",
            "the acceptance of a depth at factor 1 is not divided by",
            "self.sums_DF[depths, best] / before_D",
            "self.sums_DF[depths, best] / self.judged_D",
        ),
        ("WU71", "few judged tokens are as good as many", "judged >= _FEWEST else", "judged >= 1 else"),
        ("WU72", "overlap as the largest of p and q", "torch.minimum(p_BKV, each)", "torch.maximum(p_BKV, each)"),
        (
            "WU73",
            "the target's own distribution one token later",
            "warper(logits_BNV)[:, :-1]",
            "warper(logits_BNV)[:, 1:]",
        ),
        (
            "WU74",
            "rows of a batch are not added up",
            ".where(judged_BK[..., None], 0.0).sum(0)",
            ".where(judged_BK[..., None], 0.0)[0]",
        ),
        ("WU75", "places that were not judged count", "overlap_BKF.where(judged_BK[..., None], 0.0)", "overlap_BKF"),
        (
            "WU76",
            "a chain's factors are those of the longest one",
            "factors = list(self.factors_D[:size])",
            "factors = list(self.factors_D)",
        ),
        ("WU77", "few judged tokens take factor 1", "(best or [own])[-1]", "own"),
        (
            "WU78",
            "factors are inverted",
            "replace(warper, temperature=factor)",
            "replace(warper, temperature=1 / factor)",
        ),
    ),
    *bugs_of(
        "eval/tune/break_even.py",
        FOLDER + "test_break_even.py",
        (
            "WU80",
            "the setting that pays last stands for its method",
            "factor, setting = min(known",
            "factor, setting = max(known",
        ),
        (
            "WU81",
            "slower by its value, not by its interval",
            "slower = fastest.speedup.high < 1",
            "slower = fastest.speedup.value < 1",
        ),
        (
            "WU82",
            "what was measured to be slower pays at the prediction",
            "max(AT_LEAST, factor) if slower",
            "factor if slower",
        ),
        (
            "WU83",
            "what was measured to pay needs a dearer call",
            "min(1.0, factor) if fastest.pays",
            "factor if fastest.pays",
        ),
        (
            "WU84",
            "all methods' settings stand for each",
            "own = [each for each in predictions if each.setting.contender.name == name]",
            "own = list(predictions)",
        ),
    ),
)
MUTATIONS = (*_PROFILE, *_RACE, *_REST)
