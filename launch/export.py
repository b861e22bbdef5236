"""`draftsmith export`: a trained drafter as a folder that a serving engine loads.

Read next: `drafters/export.py`, what the engines expect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..drafters.families import FAMILIES
from ..errors import RequestError
from ..storage import replace_folder, writable_folder
from .check.early import tuned_target
from .recipe.load import load_recipe

if TYPE_CHECKING:
    from ..drafters.export import Export as Exported
    from ..drafters.export import ServedTarget
    from .requests import ExportRequest


def export(request: ExportRequest) -> str:
    """Write the folder and return what to do with it.

    Raises:
        RequestError: no run folder, a drafter that nobody loads or made for another target, or a
            folder that is there. EnvironmentFailure: nobody may write where it is to be.
    """
    run = request.run_folder
    if not (run / "run.yaml").is_file():
        raise RequestError(f"{run} is no run folder: run.yaml is missing; name the --out of a run")
    recipe = load_recipe(str(run / "run.yaml")).recipe
    out = request.out or run / request.format
    if out.exists():
        raise RequestError(f"{out} exists; name a new folder by --out")
    writable_folder(out.parent)

    from ..decoding.target.hub import EMBEDDED, embedded_target, load_config, load_tokenizer, skeleton
    from ..decoding.target.loading import load_model
    from ..drafters.export import ServedTarget, check_served, export_of
    from ..drafters.folder import read_entry
    from ..drafters.heads.medusa import projection_of
    from ..drafters.identity import TargetIdentity

    entry = read_entry(run / "drafter")
    family, settings = entry["family"], entry["settings"]
    check_served(family, request.format)
    path = request.target or tuned_target(run, recipe) or recipe.target.path
    if path == EMBEDDED:
        path = embedded_target()  # a name that no engine knows
    revision, trust = recipe.target.revision, recipe.target.trust_remote_code
    config = load_config(path, revision=revision, trust_remote_code=trust)
    target = ServedTarget.of(path, config, skeleton(config, trust).get_input_embeddings())
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust)
    identity = TargetIdentity.of_parts(config, tokenizer, name=path, revision=revision)
    entry["identity"].check_same(identity, str(run / "drafter"))
    head = None
    if settings.get("shared_head"):
        model = load_model(path, revision=revision, trust_remote_code=trust)
        head = projection_of(model).detach()
    made = export_of(run / "drafter", family, settings, target, request.format, dtype=request.dtype, head_VH=head)
    replace_folder(out, lambda folder: _fill(folder, made))
    most = FAMILIES[family].most_tokens(settings)
    tokens = recipe.eval.draft_length if most is None else min(most, recipe.eval.draft_length)
    return f"{out}: load it with\n{_command(out, family, request.format, target, tokens)}"


def _fill(folder: Path, made: Exported) -> None:
    from safetensors.torch import save_file

    save_file(made.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(made.config, indent=2) + "\n")


def _command(out: Path, family: str, form: str, target: ServedTarget, tokens: int) -> str:
    """How the engine is started; the method is named, or it would be guessed from the path."""
    if form == "speculators":
        return f"  vllm serve {out}"
    if form == "sglang":
        name = family.upper()
        return (
            f"  python -m sglang.launch_server --model-path {target.path} "
            f"--speculative-algorithm {name} --speculative-draft-model-path {out}"
        )
    config = {"method": family, "model": str(out), "num_speculative_tokens": tokens}
    return f"  vllm serve {target.path} --speculative-config '{json.dumps(config)}'"
