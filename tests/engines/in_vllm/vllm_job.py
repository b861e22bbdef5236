"""vLLM at work, run by the Python of its own environment: a job a line in, a line out when it is done.

A line names two files: the job to read and the result to write (JSON). No module of draftsmith is
imported here: the engine sees exported folders and nothing else. Read next: `engines/engine.py`, the other end.

What is done to vLLM, and why:

- Every parameter is NaN (integers: a number that no vocabulary has) before its loader runs, so that a
  weight which the loader leaves alone shows.
- Two functions are replaced (`mended.py`). `faults` says whether the build at hand still needs that. A job that is
  `as_it_comes` has DFlash's own again.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# one process, nothing from the hub, no word to anybody
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import mended  # replaces what is faulty
import torch
import vllm
from replacing import Replacing
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

NEVER = -(2**40)
COUNTERS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted"}


def poisoned(load: Any) -> Any:
    """A loader that finds nothing of what a model was initialised with."""

    def load_weights(self: Any, model: torch.nn.Module, config: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan") if parameter.is_floating_point() else NEVER)
        load(self, model, config)

    return load_weights


def untouched(model: torch.nn.Module) -> list[str]:
    """Parameters that hold some of what they were poisoned with."""
    return [
        name
        for name, each in model.named_parameters()
        if bool(each.isnan().any() if each.is_floating_point() else (each == NEVER).any())
    ]


def counters(engine: LLM) -> dict[str, Any]:
    found: dict[str, Any] = {"drafts": 0, "accepted": []}
    for metric in engine.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] = metric.values if hasattr(metric, "values") else metric.value
    return found


def answered(engine: LLM, run: dict[str, Any]) -> dict[str, Any]:
    """Tokens of all prompts, and in how many steps there was a draft and each position was accepted."""
    before = counters(engine)
    prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
    samplings = [
        SamplingParams(temperature=run["temperature"], max_tokens=run["max_tokens"], seed=seed)
        for seed in range(len(prompts))
    ]
    done = engine.generate(prompts, samplings, use_tqdm=False)
    after = counters(engine)
    earlier = before["accepted"] or [0] * len(after["accepted"])
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in done],
        "drafts": after["drafts"] - before["drafts"],
        "accepted": [now - then for now, then in zip(after["accepted"], earlier, strict=True)],
    }


def done(job: dict[str, Any]) -> dict[str, Any]:
    """Load what the job names, and answer each of its runs."""
    DFlashQwen3Model._normalize_context_k = mended.AS_IT_COMES if job["as_it_comes"] else mended.normed
    engine = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=16,
        seed=0,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=job["speculative_config"],
        hf_overrides=job["of_target"],
    )
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner, drafter = worker.model_runner, worker.get_draft_model()
    models = {"target": runner.model} | ({} if drafter is None else {"drafter": drafter})
    found = {
        "version": vllm.__version__,
        "faults": mended.faults(),
        "class": type(drafter).__name__,
        "untouched": [f"{whose}: {name}" for whose, model in models.items() for name in untouched(model)],
        "runs": [answered(engine, run) for run in job["runs"]],
        "again": [],
    }
    if job["replaced_by"] is not None:
        engine.collective_rpc(Replacing.replace_drafter, args=(job["replaced_by"],))
        found["again"] = [answered(engine, run) for run in job["runs"]]
    return found


def main() -> None:
    DefaultModelLoader.load_weights = poisoned(DefaultModelLoader.load_weights)
    # what vLLM prints goes to the log, and the other end reads our words alone
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job, result = map(Path, json.loads(line))
        try:
            written = done(json.loads(job.read_text()))
        except Exception:  # noqa: BLE001 - the other end raises it, and the next job may do
            written = {"error": traceback.format_exc()}
        gc.collect()
        cleanup_dist_env_and_memory()
        result.write_text(json.dumps(written))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
