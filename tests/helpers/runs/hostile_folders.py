"""A target, drafters of every family and other folders, and what a hostile hand does to each of them.

`tests/hostile/test_folders.py` gives each result to the real command line.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import make_drafter, make_target
from draftsmith.data.datastore_build import build_datastore
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.folder import save_draft_model, save_heads
from draftsmith.drafters.identity import fingerprint
from draftsmith.drafters.model.early_exit import save_early_exit
from draftsmith.drafters.model.ensemble import save_ensemble
from draftsmith.drafters.model.quantised import save_quantised
from draftsmith.trainers.method_config import LoraConfig
from draftsmith.trainers.student.lora import add_adapter, save_adapted
from helpers.models.small_drafters import make_on_target
from safetensors.torch import load_file, save_file

Plant = Callable[[Path, Path], None]
"""(folder to damage, file that only executed code would make)"""


def make_folders(place: Path) -> None:
    """`target`, and beside it a folder for each kind of drafter, a datastore and a tree."""
    target = make_target_folder(place / "target")
    save_draft_model(make_drafter(target).module, place / "draft_model", target)
    shutil.copytree(place / "draft_model", place / "across")
    save_ensemble(place / "ensemble", [place / "draft_model", place / "draft_model"], target)
    save_early_exit(place / "early_exit", target, layers=1)
    save_quantised(place / "quantised", target, bits=8)
    _save_adapted(place / "adapted", target)
    _save_on_target(place, target)
    documents = [[5, 6, 7, 8, 9] * 4, [6, 7, 8] * 5]
    build_datastore(
        documents, place / "datastore", vocabulary=target.vocabulary, tokenizer=fingerprint(target.tokenizer)
    )
    shutil.copytree(place / "target", place / "template")
    (place / "prompts.jsonl").write_text(json.dumps({"prompt": "abc def"}) + "\n")
    for name, file in {"results": "results.json", "run": "run.yaml", "checkpoint": "manifest.json"}.items():
        (place / name).mkdir()
        (place / name / file).write_text("{}")
    (place / "tree").mkdir()
    (place / "tree" / "tree.json").write_text(json.dumps({"format": 1, "paths": [[0], [1], [0, 0]]}))


def make_target_folder(folder: Path) -> Backbone:
    """A small target with a tokenizer, read back from its folder."""
    model = make_target("qwen3").model
    tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(str(folder))


def _save_adapted(folder: Path, target: Backbone) -> None:
    draft = make_drafter(target).module
    add_adapter(draft, "one", rank=4, alpha=8.0, dropout=0.0, layers=[], section="lora")
    save_adapted(draft, folder, target, LoraConfig(rank=4, name="one"))


def _save_on_target(place: Path, target: Backbone) -> None:
    from draftsmith.drafters.eagle.net3 import Eagle3Net

    for family in ("medusa", "hydra++", "bpd", "eagle"):
        module = make_on_target(family, target).module
        save_heads(module, place / family, target, family=family, settings=asdict(module.config))
    net = Eagle3Net.for_target(target.model, layers=(0, 1, 2), ids=range(0, target.vocabulary, 2))
    save_heads(net, place / "eagle3", target, family="eagle3", settings=asdict(net.config))


# ---- what is done to a folder ------------------------------------------------------------------


def _json(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    path = folder / name
    path.write_text(json.dumps(change(json.loads(path.read_text()) if path.is_file() else {})))


def keys(name: str = "config.json", **values: Any) -> Plant:
    """Put keys into a JSON file."""
    return lambda folder, _mark: _json(folder, name, lambda content: content | values)


def text(name: str, content: str | bytes) -> Plant:
    """Write a file anew."""

    def plant(folder: Path, _mark: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return plant


def setting(**values: Any) -> Plant:
    """Put settings into a drafter's config."""

    def change(config: Any) -> Any:
        config["draftsmith"]["settings"] |= values
        return config

    return lambda folder, _mark: _json(folder, "config.json", change)


def entry(**values: Any) -> Plant:
    """Put keys into a drafter's entry."""

    def change(config: Any) -> Any:
        config["draftsmith"] |= values
        return config

    return lambda folder, _mark: _json(folder, "config.json", change)


def filled(value: float, name: str = "model.safetensors") -> Plant:
    """Fill the first matrix of the weights with one number."""

    def plant(folder: Path, _mark: Path) -> None:
        tensors = load_file(folder / name)
        first = next(key for key, each in tensors.items() if each.ndim > 1 and each.is_floating_point())
        tensors[first] = torch.full_like(tensors[first], value)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return plant


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Change one tensor."""

    def plant(folder: Path, _mark: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})

    return plant


class _Runs:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def pickled(name: str, instead_of: str | None = "model.safetensors") -> Plant:
    """A pickle that makes a file when it is read, in place of the weights."""

    def plant(folder: Path, mark: Path) -> None:
        if instead_of is not None:
            (folder / instead_of).unlink()
        (folder / name).write_bytes(pickle.dumps({"weight": _Runs(mark)}))

    return plant


def module(name: str, *classes: str) -> Plant:
    """A module that makes a file when it is imported."""

    def plant(folder: Path, mark: Path) -> None:
        lines = [f"open({str(mark)!r}, 'w').close()", *(f"class {each}: pass" for each in classes)]
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n".join(lines) + "\n")

    return plant


def all_of(*plants: Plant) -> Plant:
    """One after the other."""

    def plant(folder: Path, mark: Path) -> None:
        for each in plants:
            each(folder, mark)

    return plant


def _index(folder: Path, name: str) -> None:
    names = load_file(folder / "model.safetensors")
    listed = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


def indexed(name: str) -> Plant:
    """An index that names one file for all weights, and no weights beside it."""

    def plant(folder: Path, mark: Path) -> None:
        _index(folder, name)
        (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
        if name.endswith(".bin"):
            (folder / name).write_bytes(pickle.dumps({"weight": _Runs(mark)}))

    return plant


def member_leads_back(folder: Path, _mark: Path) -> None:
    """An ensemble whose first member is a link to itself."""
    shutil.rmtree(folder / "ssm-1")
    (folder / "ssm-1").symlink_to(folder, target_is_directory=True)


def tuned(**settings: str) -> Plant:
    """What `draftsmith tune` would have measured."""
    return text("tuned.json", json.dumps({"format": 1, "settings": settings}))


def _evil_model(folder: Path, mark: Path) -> None:
    """A model whose class is a module of its own."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", **NATIVE}))
    module("evil.py", "Config", "Model")(folder, mark)


def trusting_run(folder: Path, mark: Path) -> None:
    """A run folder whose own record trusts the code of its target."""
    _evil_model(folder / "evil", mark)
    target = json.dumps({"path": str(folder / "evil"), "trust_remote_code": True})
    (folder / "run.yaml").write_text(f"method: distill\ntarget: {target}\n")


def trusting_parent(folder: Path, mark: Path) -> None:
    """A target as a run has tuned it, and that run's record, which trusts the code of the original."""
    trusting_run(folder.parent, mark)


def pipe(name: str) -> Plant:
    """A pipe in place of a file: whoever opens it waits for ever."""

    def plant(folder: Path, _mark: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return plant


def deep(levels: int = 100_000) -> str:
    """JSON that is nested deeper than any reader follows."""
    return "[" * levels + "]" * levels


def object_array(folder: Path, mark: Path) -> None:
    """A datastore whose tokens are pickled objects."""
    for path in folder.glob("tokens-*.npy"):
        np.save(path, np.array([_Runs(mark)], dtype=object), allow_pickle=True)


def beyond(folder: Path, _mark: Path) -> None:
    """A datastore with tokens that no vocabulary has."""
    for path in folder.glob("tokens-*.npy"):
        tokens = np.load(path)
        tokens[:] = np.where(tokens == tokens.max(), tokens, np.iinfo(tokens.dtype).max)
        np.save(path, tokens)


KERNEL = {"attn_implementation": "evil/kernel"}
AUTOQUANT = {"quant_method": "torchao", "quant_type": {"default": {"_type": "autoquant", "_data": {}}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
NATIVE = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}, "tokenizer_class": "EvilTokenizer"}


@dataclass(frozen=True)
class Case:
    """One hostile folder: which one is damaged, and how."""

    name: str
    base: str
    plant: Plant
    refused: bool = True
    """Or it may be used as it is, what is hostile in it being passed over."""


def _cases(base: str, refused: bool = True, **plants: Plant) -> Iterator[Case]:
    for name, plant in plants.items():
        yield Case(f"{base}: {name.replace('_', ' ')}", base, plant, refused)


CASES = [
    *_cases(
        "target",
        a_pickle=pickled("pytorch_model.bin"),
        a_pickle_by_another_name=pickled("model.pt"),
        an_index_of_pickles=indexed("pytorch_model.bin"),
        an_index_that_leads_out=indexed("../elsewhere.safetensors"),
        an_index_with_an_absolute_path=indexed("/elsewhere.safetensors"),
        an_original_that_its_run_trusts=trusting_parent,
        no_weights=lambda folder, _mark: (folder / "model.safetensors").unlink(),
        a_kernel=keys(**KERNEL),
        a_private_kernel=keys(_attn_implementation="evil/kernel"),
        a_kernel_in_a_table=keys(attn_implementation={"text_config": "evil/kernel"}),
        a_kernel_further_in=keys(text_config=KERNEL),
        a_kernel_of_experts=keys(experts_implementation="evil/kernel"),
        a_quantiser=keys(quantization_config={"quant_method": "evil", "bits": 4}),
        a_function_as_quantiser=keys(quantization_config=AUTOQUANT),
        a_quantiser_beside_its_generation=keys("generation_config.json", quantization_config=GPTQ),
        code_of_its_own=all_of(keys(model_type="evil", **NATIVE), module("evil.py", "Config", "Model")),
        trust_in_its_config=all_of(keys(trust_remote_code=True, **NATIVE), module("evil.py", "Config", "Model")),
        other_weights=all_of(keys(transformers_weights="adapter_model.bin"), pickled("adapter_model.bin", None)),
        fusions=keys(fusion_config={"evil": True}),
        a_name_of_a_function=keys(get_text_config="x"),
        a_million_layers=keys(num_hidden_layers=1_000_000),
        too_many_layers_to_count=keys(num_hidden_layers=10**15),
        a_million_labels=keys(num_labels=10**9),
        a_hidden_size_of_a_hundred_million=keys(hidden_size=10**8),
        a_billion_heads=keys(num_attention_heads=10**9),
        a_billion_tokens=keys(vocab_size=10**9),
        negative_sizes=keys(hidden_size=-32),
        a_size_beyond_all_numbers=keys(intermediate_size=10**400),
        heads_that_are_none=keys(num_attention_heads=0),
        a_list_as_config=text("config.json", "[]"),
        a_deep_config=text("config.json", deep()),
        a_config_that_is_no_text=text("config.json", b"\xff\xfe{}"),
        a_type_that_is_a_function=keys(dtype="load"),
        whole_numbers_as_weights=tensor("model.norm.weight", lambda t: t.long()),
        weights_that_are_a_pipe=pipe("model.safetensors"),
        odd_layer_types=keys(layer_types=[["x"]]),
        odd_rope=keys(rope_parameters={"rope_type": "evil", "rope_theta": "x"}),
        an_adapter_of_something_else=keys("adapter_config.json", peft_type="LORA", base_model_name_or_path="evil/x"),
        an_adapter_as_a_pickle=all_of(
            keys("adapter_config.json", peft_type="LORA", r=4), pickled("adapter_model.bin", None)
        ),
        a_generation_of_its_own=keys("generation_config.json", custom_generate="evil/generate"),
        a_function_of_generation=keys("generation_config.json", validate="x"),
        a_list_as_generation_config=text("generation_config.json", "[]"),
        ends_that_are_no_tokens=keys("generation_config.json", eos_token_id="x"),
        nested_ends=keys("generation_config.json", eos_token_id=[[1]]),
        a_list_as_tokenizer=text("tokenizer.json", "[]"),
        a_deep_tokenizer=text("tokenizer.json", deep()),
        trust_in_its_tokenizer=all_of(
            keys("tokenizer_config.json", trust_remote_code=True, **TOKENIZER), module("evil.py", "Slow", "Fast")
        ),
    ),
    *_cases(
        "target",
        refused=False,
        code_beside_a_known_class=all_of(keys(**NATIVE), module("evil.py", "Config", "Model")),
        a_tokenizer_of_its_own=all_of(keys("tokenizer_config.json", **TOKENIZER), module("evil.py", "Slow", "Fast")),
        a_generate_of_its_own=module("custom_generate/generate.py", "generate"),
        a_choice_of_attention=keys(_attn_implementation="flash_attention_2"),
        a_pickle_beside_the_weights=pickled("pytorch_model.bin", None),
    ),
    *_cases(
        "medusa",
        a_billion_heads=setting(heads=10**9),
        layers_without_end=setting(layers=10**9),
        a_size_that_is_no_number=setting(hidden=float("nan")),
        a_negative_size=setting(vocabulary=-1),
        another_hidden_size=setting(hidden=64),
        weights_that_are_no_numbers=filled(float("nan")),
        a_list_as_config=text("config.json", "[]"),
        a_deep_config=text("config.json", deep()),
        a_family_that_is_a_list=entry(family=["medusa"]),
        a_target_that_is_a_word=entry(target="x"),
        another_format=entry(format=10**30),
        whole_numbers_as_weights=tensor("blocks.0.layers.0.weight", lambda t: t.long()),
        another_shape=tensor("blocks.0.layers.0.weight", lambda t: t[:3]),
        a_pickle=pickled("pytorch_model.bin"),
    ),
    *_cases(
        "medusa",
        a_setting_that_is_a_path=tuned(**{"drafter.rest.datastore": "/elsewhere"}),
        a_setting_of_the_run=tuned(**{"target.trust_remote_code": "true"}),
        a_length_of_a_thousand_digits=tuned(**{"eval.draft_length": "9" * 5_000}),
        a_setting_that_a_terminal_obeys=tuned(**{"drafter.policy": "\x1b[31m"}),
        deep_settings=text("tuned.json", deep()),
    ),
    *_cases("hydra++", a_layer_of_another_width=setting(prefix={"hidden": 8}), infinity=filled(float("inf"))),
    *_cases("bpd", a_block_of_one=setting(block=1), a_billion_units=setting(inner=10**9), nan=filled(float("nan"))),
    *_cases(
        "eagle",
        a_billion_heads=setting(heads=10**9),
        an_odd_head_size=setting(head_size=15),
        an_angle_of_infinity=setting(rope_theta=float("inf")),
        infinity=filled(float("inf")),
    ),
    *_cases(
        "eagle3",
        tokens_beyond_the_vocabulary=tensor("d2t", lambda t: t + 10**6),
        tokens_below_none=tensor("d2t", lambda t: t - 10**6),
        one_token_twice=tensor("d2t", lambda t: -torch.arange(len(t))),
        states_that_are_not_there=setting(layers=[0, 99, -5]),
        states_that_are_words=setting(layers=["x", None, 1.5]),
        a_million_states=setting(layers=[1] * 1_000_000),
        a_norm_that_is_a_word=setting(feature_norms="x"),
        nan=filled(float("nan")),
    ),
    *_cases(
        "draft_model",
        a_pickle=pickled("pytorch_model.bin"),
        a_kernel=keys(**KERNEL),
        a_million_layers=keys(num_hidden_layers=1_000_000),
        nan=filled(float("nan")),
        whole_numbers_as_weights=tensor("model.norm.weight", lambda t: t.long()),
        truth_as_weights=tensor("model.norm.weight", lambda t: t.bool()),
        complex_weights=tensor("model.norm.weight", lambda t: t.to(torch.complex64)),
        another_shape=tensor("model.norm.weight", lambda t: t[:3]),
        weights_that_are_a_pipe=pipe("model.safetensors"),
        a_config_that_is_a_pipe=pipe("config.json"),
    ),
    *_cases(
        "across",
        a_kernel=keys(**KERNEL),
        nan=filled(float("nan")),
        a_pickle=pickled("pytorch_model.bin"),
        no_draft_at_all=text("config.json", "{}"),
    ),
    *_cases(
        "ensemble",
        itself_as_member=setting(members=["."]),
        a_member_elsewhere=setting(members=["../draft_model", "ssm-2"]),
        a_member_twice=setting(members=["ssm-1"] * 1_000),
        a_link_to_itself=member_leads_back,
        members_that_are_numbers=setting(members=[1, 2]),
    ),
    *_cases(
        "adapted",
        a_module_to_import=keys("adapters/one/adapter_config.json", megatron_config={}, megatron_core="evil"),
        a_pattern_without_end=keys("adapters/one/adapter_config.json", target_modules="(a+)+$"),
        a_rank_of_a_billion=keys("adapters/one/adapter_config.json", r=10**9),
        another_kind=keys("adapters/one/adapter_config.json", peft_type="IA3"),
        a_deep_config=text("adapters/one/adapter_config.json", deep()),
        copies_of_layers=keys("adapters/one/adapter_config.json", layer_replication=[[0, 1]] * 1_000),
        a_pickle=pickled("adapters/one/adapter_model.bin", "adapters/one/adapter_model.safetensors"),
        nan=filled(float("nan"), "adapters/one/adapter_model.safetensors"),
        a_name_that_is_a_path=setting(adapters=["../adapters/one"]),
    ),
    *_cases("early_exit", a_billion_layers=setting(layers=10**9), layers_as_a_word=setting(layers="x")),
    *_cases("quantised", bits_as_a_word=setting(bits="x"), groups_of_none=setting(bits=4, group_size=0)),
    *_cases(
        "datastore",
        an_empty_manifest=text("manifest.json", "{}"),
        a_list_as_manifest=text("manifest.json", "[]"),
        a_deep_manifest=text("manifest.json", deep()),
        a_vocabulary_beyond_all=keys("manifest.json", vocabulary=10**12),
        a_list_of_nothing=keys("manifest.json", shards=[None]),
        pickled_objects=object_array,
        tokens_beyond_the_vocabulary=beyond,
        tokens_that_are_a_pipe=pipe("tokens-00000.npy"),
    ),
    *_cases(
        "template",
        refused=False,  # what a template may not do is an error or nothing, as Jinja's sandbox has it
        a_way_to_objects=text("chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        a_way_to_files=text("chat_template.jinja", "{% include '/etc/hostname' %}"),
        a_way_by_a_filter=text("chat_template.jinja", "{{ messages|attr('__class__') }}"),
        a_way_by_globals=text("chat_template.jinja", "{{ cycler.__init__.__globals__.os.system('id') }}"),
        no_number=text("chat_template.jinja", "{{ 1/0 }}"),
        a_number_too_large=text("chat_template.jinja", "{{ 10.0**400 }}"),
        a_range_without_end=text("chat_template.jinja", "{% for a in range(10**9) %}x{% endfor %}"),
        loops_in_loops=text(
            "chat_template.jinja", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        ),
        a_macro_of_itself=text("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        text_beyond_all_memory=text("chat_template.jinja", "{{ 'a' * 10**13 }}"),
        no_jinja=text("chat_template.jinja", "{% for %}"),
    ),
    *_cases(
        "results",
        nothing_but_a_version=text("results.json", '{"schema_version": 4}'),
        rows_that_are_words=text("results.json", '{"schema_version": 4, "rows": ["x"], "sweep": []}'),
        no_rows=text("results.json", '{"schema_version": 4, "rows": [], "sweep": []}'),
        rows_without_figures=text(
            "results.json", '{"schema_version": 4, "rows": [{"verdict": "lossless", "categories": []}], "sweep": []}'
        ),
        deep_results=text("results.json", deep()),
    ),
    *_cases(
        "run",
        a_target_that_it_trusts=trusting_run,
        a_tag=text("run.yaml", "method: !!python/object/apply:os.system [id]\n"),
        an_alias_without_end=text("run.yaml", "a: &a [*a, *a]\nmethod: *a\n"),
        a_list_as_recipe=text("run.yaml", "- method\n"),
        deep_values=text("run.yaml", f"method: {deep(5_000)}\n"),
        an_order_to_the_terminal=text("run.yaml", 'method: distill\nsummary: "\\e[2J"\n'),
        a_megabyte=text("run.yaml", "method: distill\n" + "# x\n" * 250_000),
        no_text=text("run.yaml", b"\xff\xfe\x00"),
    ),
    *_cases(
        "checkpoint",
        no_files=text("manifest.json", '{"format": 1, "files": {}}'),
        files_that_are_a_list=text("manifest.json", '{"format": 1, "files": []}'),
        files_without_sizes=text("manifest.json", '{"format": 1, "files": {"model.safetensors": null}}'),
        files_elsewhere=text("manifest.json", '{"format": 1, "files": {"../x": {"bytes": 1, "sha256": "0"}}}'),
        a_deep_manifest=text("manifest.json", deep()),
    ),
    *_cases(
        "tree",
        a_list=text("tree.json", "[]"),
        ranks_of_infinity=text("tree.json", '{"format": 1, "paths": [[Infinity]]}'),
        a_deep_tree=text("tree.json", deep()),
        a_hundred_thousand_paths=text("tree.json", json.dumps({"format": 1, "paths": [[n] for n in range(100_000)]})),
    ),
]


def copied(case: Case, made: Path, place: Path, mark: Path) -> Path:
    """The case's folder, damaged."""
    folder = Path(shutil.copytree(made / case.base, place / case.base))
    for path in folder.rglob("*"):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)  # noqa: PTH101
    case.plant(folder, mark)
    return folder
