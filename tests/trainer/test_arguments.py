"""The arguments survive everything that is done with `TrainingArguments`: command lines, files, pickles, copies."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig
from transformers import HfArgumentParser

from hf_mmparallel import ModulePlugin, MultimodalParallelPlugin, MultimodalTrainingArguments
from hf_mmparallel.arrange.arrangements import contiguous
from hf_mmparallel.plan import plan_for_model
from tests.plan.specs import model_spec
from tests.trainer.contexts import arguments as make

SIZES = {"vision": {"dp_size": 2}, "language_model": {"tp_size": 2, "pp_size": 2}}


def layouts(args: MultimodalTrainingArguments) -> dict[str, dict[str, Any]]:
    """Module -> its settings."""
    assert args.plugin is not None
    return {name: module.to_dict() for name, module in args.plugin.modules.items()}


def assert_plain(value: Any) -> None:
    """Only what JSON holds, all the way down."""
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) is str
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert value is None or type(value) in (str, int, float, bool), value


def parsed(*words: str) -> MultimodalTrainingArguments:
    """The arguments of a command line."""
    line = ["--output_dir", "unused", "--use_cpu", *words]
    (args,) = HfArgumentParser(MultimodalTrainingArguments).parse_args_into_dataclasses(line)
    return args


def test_a_command_line_takes_json():
    args = parsed("--parallel", json.dumps(SIZES), "--global_batch_size", "64")
    assert layouts(args) == SIZES and args.global_batch_size == 64
    text = HfArgumentParser(MultimodalTrainingArguments).format_help().lower()
    assert "--parallel" in text and "samples of an optimizer step" in text


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_command_line_takes_a_file(tmp_path: Path, suffix: str):
    path = tmp_path / f"layout{suffix}"
    data = {"modules": SIZES, "schedule": "gpipe"}
    path.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data))
    args = parsed("--parallel", str(path))
    assert layouts(args) == SIZES and args.plugin is not None and args.plugin.schedule == "gpipe"
    assert isinstance(args.parallel, dict)  # the file is read once; later changes to it have no effect


def test_a_config_file_takes_a_nested_layout(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"output_dir": "unused", "use_cpu": True, "parallel": SIZES}))
    (args,) = HfArgumentParser(MultimodalTrainingArguments).parse_yaml_file(str(path))
    assert layouts(args) == SIZES


def test_a_search_is_asked_for_by_a_word_or_with_settings_of_modules(tmp_path: Path):
    for args in (parsed("--parallel", "auto"), make(parallel="auto")):
        assert args.plugin == MultimodalParallelPlugin(auto=True)
    modules = {"vision": {"freeze": "tower", "tp_size": 1}, "language_model": {"cp_size": 2}}
    path = tmp_path / "layout.yaml"
    path.write_text(yaml.safe_dump({"auto": True, "schedule": "eager", "modules": modules}))
    args = make(parallel=str(path))
    assert_plain(args.parallel)
    for again in (args, make(parallel=json.dumps(args.to_dict()["parallel"])), pickle.loads(pickle.dumps(args))):
        assert again.plugin is not None and again.plugin.auto and again.plugin.schedule == "eager"
        assert layouts(again) == modules
        assert again.plugin.fixed_sizes == {"vision": {"tp_size": 1}, "language_model": {"cp_size": 2}}


def test_a_saved_plan_is_a_layout(tmp_path: Path):
    spec = model_spec()
    plan = plan_for_model(MultimodalParallelPlugin({"vision": ModulePlugin(dp_size=2)}), spec, None)
    plan.save(tmp_path / "plan.yaml")
    args = make(parallel=str(tmp_path / "plan.yaml"))
    assert args.plugin is not None and args.plugin.plan == plan
    assert_plain(args.parallel)
    assert make(parallel=args.to_dict()["parallel"]).plugin == args.plugin


@pytest.mark.parametrize(
    "given",
    [
        {"vision": ModulePlugin(dp_size=2), "language_model": ModulePlugin(tp_size=2, pp_size=2)},
        {"vision": ModulePlugin(dp_size=2), "language_model": {"tp_size": 2, "pp_size": 2}},
        MultimodalParallelPlugin({"vision": ModulePlugin(dp_size=2), "language_model": SIZES["language_model"]}),
        SIZES,
        {"modules": SIZES},
    ],
    ids=["plugins", "mixed", "whole plugin", "dicts", "nested dicts"],
)
def test_every_form_becomes_the_same_plain_data(given: Any):
    args = make(parallel=given)
    assert args.parallel == {"modules": SIZES, "schedule": "1f1b"}
    assert_plain(args.parallel)


def test_an_adapter_config_becomes_plain_data():
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    args = make(parallel={"language_model": ModulePlugin(peft_config=config)})
    assert_plain(args.parallel)
    stored = layouts(args)["language_model"]["peft_config"]
    assert stored["r"] == 4 and sorted(stored["target_modules"]) == ["q_proj", "v_proj"]
    assert stored["peft_type"] == "LORA"
    assert make(parallel=json.loads(json.dumps(args.parallel))).parallel == args.parallel


def test_json_pickle_and_replace_keep_the_layout(tmp_path: Path):
    args = make(parallel=SIZES, global_batch_size=32, seed=7)
    assert json.loads(args.to_json_string())["parallel"] == args.parallel
    assert args.to_sanitized_dict()["global_batch_size"] == 32
    assert pickle.loads(pickle.dumps(args)).parallel == args.parallel
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.plugin == args.plugin and loaded.global_batch_size == 32
    replaced = dataclasses.replace(args, seed=8)
    assert replaced.parallel == args.parallel and (replaced.seed, args.seed) == (8, 7)
    other = dataclasses.replace(args, parallel={"language_model": {"dp_size": 3}})
    assert layouts(other) == {"language_model": {"dp_size": 3}} and layouts(args) == SIZES


def test_a_layout_does_not_share_memory_with_what_was_given():
    given = {"language_model": {"layers_per_stage": [1, 2]}}
    args = make(parallel=given)
    given["language_model"]["layers_per_stage"].append(9)
    assert layouts(args)["language_model"]["layers_per_stage"] == [1, 2]


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        ({"vision": {"dp_sizes": 2}}, r"`dp_sizes`.*`dp_size`\?"),
        ("no-such-file.yaml", "`parallel='no-such-file.yaml'`"),
        ("{vision: [1, 2", "`parallel=.*(JSON|YAML)"),
        (["vision"], "dict of modules"),
        ("autos", "`parallel='autos'`.*\"auto\""),
        ({"auto": True, "plan": 3}, "`plan=3`"),
        ({"auto": True, "num_microbatches": 3}, "`num_microbatches`.*`auto=True`"),
        ({"auto": True, "modules": {"vision": {"layers_per_stage": [2, 2]}}}, "`layers_per_stage=.* of `vision`"),
    ],
)
def test_what_cannot_be_read_is_named(parallel: Any, named: str):
    with pytest.raises(ValueError, match=named):
        make(parallel=parallel)


def test_a_broken_file_and_a_batch_of_nothing_are_named(tmp_path: Path):
    (tmp_path / "layout.yaml").write_text("vision: [1, 2")
    with pytest.raises(ValueError, match=r"layout.yaml.*(JSON|YAML)"):
        make(parallel=str(tmp_path / "layout.yaml"))
    with pytest.raises(ValueError, match="`global_batch_size=0`"):
        make(global_batch_size=0)


def test_an_arrangement_may_be_a_function_of_a_module():
    args = make(microbatch_assignment=contiguous)
    assert pickle.loads(pickle.dumps(args)).microbatch_assignment is contiguous
    assert json.loads(args.to_json_string())["microbatch_assignment"] == "contiguous"
    with pytest.raises(ValueError, match="function of a module"):
        make(microbatch_assignment=lambda *given: contiguous(*given))
