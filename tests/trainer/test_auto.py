"""`parallel="auto"`: whatever the search can return equals one process, and the Trainer goes on with what it finds."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from rich.console import Console

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.cost import Hardware, analytic_costs, find_device
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.adapter import add_adapters
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    SampleSizes,
    ShardingSettings,
    resolve_plan,
)
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.planning.device_detection import products_in
from hf_mmparallel.planning.possible_sizes import possible_sizes, stage_tp_sizes
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.simulations import step_planner
from hf_mmparallel.trainer import auto
from hf_mmparallel.trainer.auto import find_saved_plan, training_samples
from hf_mmparallel.trainer.build import PreparedModel, compute_dtype, prepare_model
from hf_mmparallel.trainer.training_sizes import TrainingSizes
from hf_mmparallel.world import World
from tests import tiny
from tests.cost.test_profile import profile_of
from tests.distributed import run_distributed
from tests.streams import Rows
from tests.trainer.contexts import arguments, context

from . import runs
from .test_experts import of_one_rank

FREEZE = {"llava": ("vision_tower",), "qwen3_vl": ()}


def tiny_model(family: str) -> Any:
    """A tiny model with some parameters frozen."""
    model = tiny.FAMILIES[family]().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FREEZE[family]))
    return model


def candidate(
    vision: ModuleLayout, language_model: ModuleLayout, shares: bool = False, num_microbatches: int = 1
) -> Candidate:
    layouts = {"vision": vision, LANGUAGE_MODEL: language_model}
    return Candidate(layouts, {"vision": LANGUAGE_MODEL} if shares else {}, num_microbatches)


RECOMPUTED, ZERO = {"activation_checkpointing": True}, {"sharding": ShardingSettings(zero_stage=1)}
CANDIDATES = {
    "shared ranks, sequences of stages and copies, recomputed": candidate(
        ModuleLayout((4,), 4, **RECOMPUTED), ModuleLayout((1, 3), 2, **RECOMPUTED), True, 2
    ),
    "shared ranks, tp on one side, slices": candidate(
        ModuleLayout((4,), 2, tp_size=2), ModuleLayout((4,), 4, **ZERO), True
    ),
    "shared ranks, tokens cut on one side": candidate(
        ModuleLayout((4,), 4), ModuleLayout((4,), 2, cp_size=2), True, 2
    ),
    "own ranks, tp on one side": candidate(ModuleLayout((4,), tp_size=2), ModuleLayout((2, 2)), num_microbatches=2),
    "own ranks, tokens cut": candidate(ModuleLayout((4,), 2), ModuleLayout((4,), cp_size=2), num_microbatches=2),
    "own ranks, uneven stages": candidate(ModuleLayout((4,)), ModuleLayout((1, 2, 1)), num_microbatches=2),
}


A_STEP = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1.0}


def run_candidates(family: str) -> list[runs.Run]:
    """A step of each candidate on this rank, arranged as in training."""
    spec = build_model_spec(tiny_model(family))
    source = size_source(tiny.make_dataset(family, runs.GLOBAL_BATCH), tiny.collate(family), spec)
    assert source is not None
    sizes = source(range(runs.GLOBAL_BATCH))
    problem = PlanningProblem(analytic_costs(spec, find_device("a40"), 4), sizes, 4, runs.GLOBAL_BATCH)
    found = []
    for own in CANDIDATES.values():
        plugin: Any = MultimodalParallelPlugin(plan=step_planner(problem, own).plan)
        size = runs.GLOBAL_BATCH // (own.layouts[LANGUAGE_MODEL].dp_size * own.num_microbatches)
        given = {"model": tiny_model(family), "per_device_train_batch_size": size, **A_STEP}
        found.append(runs.parallel_run(family, plugin, **given))
    return found


@pytest.mark.distributed
@pytest.mark.deep
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_what_the_search_can_return_equals_one_process(family: str):
    stock = runs.stock(family, {"vision": "tower"} if FREEZE[family] else {}, **A_STEP)
    ranks = run_distributed(run_candidates, 4, family, timeout=120)
    for name, *found in zip(CANDIDATES, *ranks, strict=True):
        runs.assert_same_run(found[0], stock)
        assert all(own.logs == found[0].logs for own in found), name


SHARED = {
    "auto": True,
    "schedule": "eager",
    "modules": {
        "vision": {"freeze": "tower", "dp_size": 2, "activation_checkpointing": False},
        LANGUAGE_MODEL: {"dp_size": 1, "pp_size": 2},
    },
}
IMPOSSIBLE = {"auto": True, "modules": {LANGUAGE_MODEL: {"tp_size": 3}}}


def auto_run(parallel: Any, **arguments: Any) -> dict[str, Any]:
    """Our Trainer with a plan that it finds, on this rank; with what it prints."""
    printed = io.StringIO()
    with mock.patch.object(auto, "stderr_console", lambda: Console(file=printed, width=160)):
        trainer = runs.make_trainer("llava", parallel, **arguments)
    return {
        "run": runs.run_of(trainer),
        "plan": trainer.plan,
        "batch": (trainer.global_batch_size, trainer.args.per_device_train_batch_size),
        "printed": printed.getvalue(),
        "result": trainer.search and trainer.search.result and str(trainer.search.result.best.candidate),
    }


def auto_runs(folder: str) -> tuple[dict[str, Any], str]:
    """A run that searches freely, and what is said of settings that nothing fits."""
    found = auto_run("auto", output_dir=folder, global_batch_size=None, per_device_train_batch_size=4)
    with pytest.raises(ValueError) as refused:
        runs.make_trainer("llava", IMPOSSIBLE)
    return found, str(refused.value)


@pytest.mark.distributed
def test_auto_trains_as_the_stock_trainer_and_says_what_it_found(tmp_path: Path):
    (first, refused), (other, also_refused) = run_distributed(auto_runs, 2, str(tmp_path), timeout=120)
    runs.assert_same_run(first["run"], runs.stock("llava"))
    assert first["plan"] == other["plan"] == ParallelPlan.load(tmp_path / "plan.yaml")
    assert first["plan"].world_size == 2 and "<html" in (tmp_path / "plan.html").read_text()
    assert first["batch"] == other["batch"] and first["batch"][0] == runs.GLOBAL_BATCH
    assert first["printed"] and other["printed"] == "" and other["result"] is None
    assert refused == also_refused and "language_model tp_size=3" in refused


@pytest.mark.deep
@pytest.mark.distributed
def test_auto_keeps_to_what_is_set():
    kept = run_distributed(auto_run, 2, SHARED, timeout=120)[0]
    runs.assert_same_run(kept["run"], runs.stock("llava", freeze={"vision": "tower"}))
    vision, language_model = (kept["plan"].modules[name] for name in ("vision", LANGUAGE_MODEL))
    assert vision.layout.startswith("dp 2") and not vision.activation_checkpointing
    assert language_model.layout == "pp 2" and kept["plan"].schedule == "eager"
    assert "on shared ranks" in kept["result"]


def test_auto_on_one_process_is_the_stock_trainer(tmp_path: Path):
    parallel = {"auto": True, "modules": {"vision": {"freeze": True}}}
    batch: Any = {"global_batch_size": 4, "per_device_train_batch_size": 2}
    args = MultimodalTrainingArguments(output_dir=str(tmp_path), parallel=parallel, **runs.COMMON, **batch)
    model = tiny.FAMILIES["llava"]()
    model.save_pretrained(tmp_path / "model")
    trainer: Any = MultimodalParallelTrainer(model=tmp_path / "model", args=args)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in trainer.model.state_dict().items())
    assert trainer.engine is None and trainer.plan is None and trainer.args.gradient_accumulation_steps == 2
    frozen = {name for name, parameter in trainer.model.named_parameters() if not parameter.requires_grad}
    assert frozen and all("vision" in name or "projector" in name for name in frozen)


def prepared(**arguments: Any) -> PreparedModel:
    args = MultimodalTrainingArguments(output_dir="unused", use_cpu=True, **arguments)
    return prepare_model(tiny.FAMILIES["llava"](), args, MultimodalParallelPlugin(auto=True), World())


def test_a_profile_of_layers_takes_the_place_of_counted_costs(tmp_path: Path):
    counted = prepared().costs
    slow = profile_of(counted.spec, {(LANGUAGE_MODEL, 0): 1000.0})
    slow.save(tmp_path / "profile.json")
    measured = prepared(layer_profile=str(tmp_path / "profile.json")).costs
    took = slow.layers[0].curves["forward"].polynomial(10, 100)
    assert measured.layers.layer(LANGUAGE_MODEL, 0, 1).forward(10, 100) == pytest.approx(took)
    assert counted.layers.layer(LANGUAGE_MODEL, 0, 1).forward(10, 100) != pytest.approx(took)
    with pytest.raises(ValueError, match="`layer_profile='missing.json'`"):
        prepared(layer_profile="missing.json")


def test_a_described_device_takes_the_place_of_the_ranks_own(tmp_path: Path):
    path, l40s = tmp_path / "gpu.yaml", find_device("l40s")
    path.write_text("like: l40s\nname: my-gpu\nmemory_gib: 40.5\n")

    def described(**settings: Any) -> Hardware:
        return prepared(gpu_spec=str(path), **settings).costs.device

    assert prepared().costs.device == find_device("cpu").computing_in("float32")
    found = described()
    assert found.name == "my-gpu" and found.memory_gib == 40.5 and found.peak_tflops == l40s.fp32_tflops
    assert described(bf16=True).peak_tflops == l40s.bf16_tflops
    with products_in("tf32"):
        assert described().peak_tflops == l40s.computing_in("tf32").peak_tflops != l40s.fp32_tflops
        assert described(bf16=True).peak_tflops == l40s.bf16_tflops
    whole = build_model_spec(tiny.FAMILIES["llava"]().to(torch.float16))
    assert compute_dtype(whole, arguments()) == "float16"
    with pytest.raises(ValueError, match="`gpu_spec=missing.yaml`"):
        prepared(gpu_spec="missing.yaml")


def test_sizes_that_a_model_can_not_have_are_not_tried():
    model = tiny.FAMILIES["llava"]()

    def found(plugin: MultimodalParallelPlugin) -> dict[str, dict[str, int]]:
        return possible_sizes(model, build_model_spec(model), plugin)

    fixed = {"auto": True, "modules": {LANGUAGE_MODEL: {"tp_size": 1}}}
    assert found(MultimodalParallelPlugin.from_any(fixed)) == {LANGUAGE_MODEL: {"tp_size": 1}}
    model.config.vision_feature_layer = 1
    eager = MultimodalParallelPlugin({LANGUAGE_MODEL: ModulePlugin(attn_implementation="eager")}, auto=True)
    assert found(eager) == {"vision": {"pp_size": 1}, LANGUAGE_MODEL: {"cp_size": 1}}
    adapters = LoraConfig(target_modules=["q_proj"], use_dora=True)
    add_adapters(model, build_model_spec(model), {LANGUAGE_MODEL: adapters})
    assert found(eager)[LANGUAGE_MODEL] == {"tp_size": 1, "cp_size": 1}


def test_sizes_that_stages_of_a_module_can_have_together():
    """Powers of two that divide heads and columns; one size where it is given, or where others can't be."""
    model = tiny.FAMILIES["llava"]()  # 4 heads; 2 key and value heads in the language model

    def found(node_size: int = 8, spec: ModelSpec | None = None, **modules: Any) -> dict[str, tuple[int, ...]]:
        plugin = MultimodalParallelPlugin.from_any({"auto": True, "modules": modules})
        return stage_tp_sizes(model, spec or build_model_spec(model), plugin, node_size)

    assert found() == {"vision": (1, 2, 4), LANGUAGE_MODEL: (1, 2)}
    assert found(3) == {"vision": (1, 2), LANGUAGE_MODEL: (1, 2)}
    assert found(1) == {"vision": (1,), LANGUAGE_MODEL: (1,)}
    assert found(vision={"tp_size": 1}, language_model={"tp_size": 2}) == {"vision": (1,), LANGUAGE_MODEL: (2,)}
    assert found(language_model={"cp_size": 2})[LANGUAGE_MODEL] == (1,)
    vision = build_model_spec(model).modules["vision"]
    odd = replace(vision.parameters[0], name="odd", shape=(6, 3), tp_dim=0)
    vision = replace(vision, parameters=(*vision.parameters, odd))
    assert found(spec=ModelSpec({"vision": vision})) == {"vision": (1,)}, "the model does not cut it as described"
    elsewhere = ModelSpec({"vision": replace(vision, stack="elsewhere")})
    assert found(spec=elsewhere) == {"vision": (1, 2)}, "4 does not divide 6"
    adapters = LoraConfig(target_modules=["q_proj"], use_dora=True)
    add_adapters(model, build_model_spec(model), {LANGUAGE_MODEL: adapters})
    assert found()[LANGUAGE_MODEL] == (1,)


def test_a_checkpoint_brings_its_plan_unless_it_does_not_fit(tmp_path: Path):
    model = prepared()
    plan = resolve_plan(model.spec, {"vision": ModulePlugin(dp_size=2)}, num_microbatches=4)
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    plan.save(folder / "parallel_plan.json")

    def saved(plugin: MultimodalParallelPlugin, **changes: Any) -> tuple[ParallelPlan | None, str]:
        given = {"resume_from_checkpoint": str(folder), "world_size": 3, "output_dir": str(tmp_path), **changes}
        return find_saved_plan(model, plugin, SimpleNamespace(**given))  # type: ignore[arg-type]

    plugin = MultimodalParallelPlugin(auto=True)
    for resumed in (str(folder), "true", True):
        found, sentence = saved(plugin, resume_from_checkpoint=resumed)
        assert found == plan and sentence
    assert saved(plugin, resume_from_checkpoint=None) == (None, "")
    found, sentence = saved(plugin, world_size=4)
    assert found is None and "but 4 were" in sentence
    fixed = MultimodalParallelPlugin.from_any({"auto": True, "modules": {"vision": {"pp_size": 2}}})
    assert "`pp_size=2`" in saved(fixed)[1]


def test_samples_that_tell_no_size_count_like_the_mean_of_the_first():
    model, collator = tiny.FAMILIES["llava"](), tiny.collate("llava")

    def measured(dataset: Any, source: Any = None) -> tuple[bool, dict[str, list[int]]]:
        def drop_columns(dataset: Any, description: str) -> tuple[Any, Any]:
            return dataset, collator

        sizes = TrainingSizes(replace(context(dataset), spec=build_model_spec(model), drop_columns=drop_columns))
        sizes.of_rank = lambda dataset: source  # type: ignore[method-assign]
        found = training_samples(sizes, 6).measured
        assert found is not None
        return found.known, {name: tokens.tolist() for name, tokens in found.tokens.items()}

    mean = (False, {LANGUAGE_MODEL: [24] * 6, "vision": [5] * 6})
    samples = tiny.make_dataset("llava", 5)
    assert measured(samples) == measured(Rows(samples)) == mean
    known = SampleSizes.uniform({LANGUAGE_MODEL: 7, "vision": 3}, 5, known=True)
    assert measured(Rows(samples), known.take) == (True, {LANGUAGE_MODEL: [7] * 5, "vision": [3] * 5})
    with pytest.raises(ValueError, match="`train_dataset`"):
        training_samples(TrainingSizes(context(None)), 8)


def auto_mixture() -> tuple[str, dict[int, float]]:
    """What a search for a mixture prints, and how it takes tokens to choose the experts that ranks share."""
    printed = io.StringIO()
    with mock.patch.object(auto, "stderr_console", lambda: Console(file=printed, width=200)):
        trainer = runs.make_trainer("llama", "auto", **of_one_rank())
        trainer.train()
    answer = None if trainer.search is None else trainer.search.answer
    return printed.getvalue(), {} if answer is None else dict(answer.costs.spec.language_model.expert_peaks)


@pytest.mark.deep
@pytest.mark.distributed
def test_a_search_measures_where_tokens_go():
    (printed, peaks), _ = run_distributed(auto_mixture, 2, timeout=120)
    assert peaks == {2: 2.0, 4: 2.0} and "2.00 times the mean one's tokens, measured on training samples" in printed
