"""Flags that make a shipped recipe's run, its audit and its evaluation a matter of seconds."""

from __future__ import annotations

import shlex

TRAINING = shlex.split(
    "--loop.batch_rows 2 --loop.micro_rows 2 --loop.validate_rows 2 --data.sequence_length 64 --data.limit_rows 40 "
    "--checkpoint.every_steps 1 --probe.prompts 1 --probe.max_new_tokens 6 --optimizer.warmup_steps 0"
)
AUDIT = shlex.split(
    "--audit.tokens 500 --audit.sequences 10000 --audit.prompts 1 --audit.max_new_tokens 8 --audit.batch 4"
)
MEASURING = ["--eval.limit", "1", "--eval.max_new_tokens", "6", "--eval.repeats", "1", *AUDIT]
