"""What is trained, exported and served: one case per form of drafter that vLLM loads.

Trained for some dozen steps: enough that drafts are accepted now and then, which is all that counts
need. Drafters of one pass train for longer: what stands behind their first draft is seldom accepted before. Read next: `conftest.py`, which trains; `test_vllm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STEPS, OF_ONE_PASS = 40, 240
Trained = Callable[[str], Path]
TRAINING = {
    "loop.steps": STEPS,
    "loop.batch_rows": 4,
    "loop.micro_rows": 4,
    "loop.validate_every": STEPS,
    "loop.validate_rows": 4,
    "checkpoint.every_steps": STEPS,
    "data.limit_rows": 400,
    "data.sequence_length": 128,
    "optimizer.warmup_steps": 5,
    "probe.every_steps": STEPS,
    "probe.prompts": 1,
    "probe.max_new_tokens": 8,
}
TUNED = {"tune.rest_steps": 10}
LONGER = {
    **dict.fromkeys(("loop.steps", "loop.validate_every", "checkpoint.every_steps", "probe.every_steps"), OF_ONE_PASS),
    "drafter.temperature_factors": "[]",  # engines draft at the request's temperature
}
# run -> its recipe, and what differs from it
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "distill": ("distill-tiny", {"loop.batch_rows": 8, "loop.micro_rows": 8}),
    "eagle": ("eagle-tiny", {}),
    "hass": ("hass-tiny", {}),
    "eagle3": ("eagle3-tiny", {}),
    "eagle3-layers": ("eagle3-tiny", {"eagle3.layers": "[1,9,15]"}),
    "eagle3-norms": ("eagle3-tiny", {"eagle3.feature_norms": "true"}),
    "dflash": ("dflash-tiny", LONGER),
    "dflash-mask": ("dflash-tiny", {**LONGER, "block.mask_token": "150"}),
    "peagle": ("peagle-tiny", LONGER),
    "pard": ("pard-tiny", LONGER),
    "mtp": ("mtp-tiny", {}),
    "medusa": ("medusa-tiny", {}),
    "medusa-shared": ("medusa-tiny", {"medusa.shared_head": "true"}),
    "medusa2": ("medusa2-tiny", {**TUNED, "tune.how": "full", "optimizer.lr": "1e-4"}),
    "medusa2-lora": ("medusa2-tiny", TUNED),
}
# the same for a public model: family -> what differs from its recipe `-small`
KNOWN_TRAINING = {
    "loop.steps": 60,
    "loop.batch_rows": 1,
    "loop.validate_every": 60,
    "loop.validate_rows": 2,
    "checkpoint.every_steps": 60,
    "data.sequence_length": 512,
    "optimizer.warmup_steps": 5,
    "probe.every_steps": 60,
    "probe.prompts": 1,
    "probe.max_new_tokens": 8,
}
KNOWN: dict[str, dict[str, object]] = {
    "distill": {},
    "eagle3": {},
    "medusa": {},
    "mtp": {},
    "dflash": {"block.size": 5},
}


@dataclass(frozen=True)
class Case:
    """An exported drafter, as the table names it."""

    title: str
    run: str
    form: str = "vllm"
    engine_class: str = ""
    """The class of vLLM's that it has to become: vLLM falls back to others without a word."""
    spare: tuple[str, ...] = ()
    """Parameters that vLLM has for another kind of file, and reads in no other case."""

    @property
    def tree(self) -> str:
        """vLLM decodes heads as a chain; drafters that draft chains anyway take no tree."""
        return "chain" if self.engine_class == "Medusa" else "default"


MASK = ("drafter: model.mask_embedding",)
REPLACED = ("draft model", "PARD", "EAGLE-1", "EAGLE-3", "MTP", "Medusa")
"""Drafters that are replaced while vLLM runs: those of whose class it replaces all weights."""
KEPT_MASK, KEPT_PRODUCTS = "P-EAGLE", "DFlash"
"""Those of which it keeps something: the state of a mask, and products that it puts together as it loads."""
CASES = (
    Case("draft model", "distill", engine_class="Qwen3ForCausalLM"),
    Case("EAGLE-1", "eagle", engine_class="EagleLlamaForCausalLM"),
    Case("HASS", "hass", engine_class="EagleLlamaForCausalLM"),
    Case("EAGLE-3", "eagle3", engine_class="Eagle3LlamaForCausalLM"),
    Case("EAGLE-3, speculators' form", "eagle3", "speculators", "Eagle3LlamaForCausalLM"),
    Case("EAGLE-3, other layers", "eagle3-layers", engine_class="Eagle3LlamaForCausalLM"),
    Case("EAGLE-3.1's norms", "eagle3-norms", engine_class="Eagle3LlamaForCausalLM"),
    Case("DFlash", "dflash", engine_class="DFlashQwen3ForCausalLM", spare=MASK),
    Case("DFlash, an id as its mask", "dflash-mask", engine_class="DFlashQwen3ForCausalLM", spare=MASK),
    Case("P-EAGLE", "peagle", engine_class="Eagle3LlamaForCausalLM"),
    Case("PARD", "pard", engine_class="Qwen3ForCausalLM"),
    Case("MTP", "mtp", engine_class="ExaoneMoeMTP"),
    Case("Medusa", "medusa", engine_class="Medusa"),
    Case("Medusa, the target's projection", "medusa-shared", engine_class="Medusa"),
    Case("Medusa-2, own target", "medusa2", engine_class="Medusa"),
    Case("Medusa-2, LoRA-tuned target", "medusa2-lora", engine_class="Medusa"),
)
KNOWN_CASES = (
    Case("draft model", "distill", engine_class="LlamaForCausalLM"),
    Case("EAGLE-3", "eagle3", engine_class="Eagle3LlamaForCausalLM"),
    Case("MTP", "mtp", engine_class="ExaoneMoeMTP"),
    Case("Medusa", "medusa", engine_class="Medusa"),
    Case("DFlash", "dflash", engine_class="DFlashQwen3ForCausalLM", spare=MASK),
)
