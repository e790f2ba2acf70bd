"""`parallel="auto"`: whatever the search can return equals one process, and the Trainer goes on with what it finds."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from rich.console import Console
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.adapters.adapter import add_adapters
from hf_mmparallel.cost import CostModel, Hardware, analytic_costs, find_device
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.packing import PackingCollator
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    SampleSizes,
    resolve_plan,
)
from hf_mmparallel.planner.possible_sizes import possible_sizes, stage_tp_sizes
from hf_mmparallel.profiling.device_detection import products_in
from hf_mmparallel.runtime.engine import EngineOptions, ParallelEngine
from hf_mmparallel.runtime.optimizer_slices import join
from hf_mmparallel.search import options
from hf_mmparallel.search.candidates import CandidateSpace
from hf_mmparallel.search.problem import Candidate, Layout, PlanningProblem
from hf_mmparallel.search.simulations import step_planner
from hf_mmparallel.trainer import auto
from hf_mmparallel.trainer.auto import saved_plan, training_samples
from hf_mmparallel.trainer.build import PreparedModel, compute_dtype, prepare_context, prepare_model
from hf_mmparallel.trainer.training_sizes import RunContext, TrainingSizes
from hf_mmparallel.world import World
from tests import tiny
from tests.cost.test_profile import profile_of
from tests.distributed import assert_ranks_raise, run_distributed
from tests.runtime.loopback import assert_close, reference
from tests.trainer.contexts import context

from . import runs

SAMPLES = 8
FREEZE = {"nothing": (), "tower": ("vision_tower", "visual.")}


def tiny_model(family: str, freeze: str) -> Any:
    """A tiny model with some parameters frozen."""
    model = tiny.FAMILIES[family]().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FREEZE[freeze]))
    return model


def problem_of(family: str, freeze: str, world_size: int, model: Any) -> PlanningProblem:
    """The search for a tiny model and its samples."""
    spec = build_model_spec(model)
    source = size_source(tiny.make_dataset(family, SAMPLES), tiny.collate(family), spec)
    assert source is not None
    costs = analytic_costs(spec, find_device("a40"), 4)
    return PlanningProblem(costs, source(range(SAMPLES)), world_size, SAMPLES)


def layouts_of(own: options.ModuleOptions, num_ranks: int) -> Iterator[Layout]:
    """Every layout of a module on a number of ranks that a search can return."""
    for kind, dp_size in itertools.product(own.kinds, options.divisors(SAMPLES)):
        pp_size, rest = divmod(num_ranks, kind.num_ranks * dp_size)
        if not rest and 0 < pp_size <= own.max_stages:
            yield own.layout(kind, dp_size, pp_size, 1.0)


def candidates(problem: PlanningProblem) -> list[Candidate]:
    """Every combination of layouts and placements that a search can return."""
    world, found = problem.num_ranks, []
    with mock.patch.object(options, "_MIN_TOKENS_PER_CP_RANK", 4):
        space = CandidateSpace(problem)
        names = list(space.options)
        for hosts in space.placements():
            free = [name for name in names if name not in hosts]
            for shares in itertools.product(range(1, world + 1), repeat=len(free)):
                if sum(shares) != world:
                    continue
                ranks = dict(zip(free, shares, strict=True))
                every = [list(layouts_of(space.options[name], ranks[hosts.get(name, name)])) for name in names]
                found += [
                    Candidate(dict(zip(names, layouts, strict=True)), hosts, count)
                    for layouts in itertools.product(*every)
                    if all(
                        a.dp_size % b.dp_size == 0 or b.dp_size % a.dp_size == 0
                        for a, b in itertools.combinations(layouts, 2)
                    )
                    for count in (1, 2)
                    if layouts[-1].dp_size * count <= SAMPLES
                ]
    return found


def run_candidates(family: str, freeze: str, chosen: list[Candidate]) -> list[dict[str, Any]]:
    """A step of each candidate on this rank."""
    torch.set_num_threads(1)
    return [run_candidate(family, freeze, candidate) for candidate in chosen]


def run_candidate(family: str, freeze: str, candidate: Candidate) -> dict[str, Any]:
    """A step of a candidate on this rank, arranged as in training."""
    model = tiny_model(family, freeze)
    problem = problem_of(family, freeze, dist.get_world_size(), model)
    planner = step_planner(problem, candidate)
    planner = replace(planner, sizes=problem.sizes.take)
    collator: Any = tiny.collate(family)
    if candidate.layouts[LANGUAGE_MODEL].cp_size > 1:
        prepare_context(model, problem.spec, None)
        collator = PackingCollator(collator, model)
    engine = ParallelEngine(model, problem.spec, planner.plan, World(), EngineOptions(costs=problem.costs))
    dataset = tiny.make_dataset(family, SAMPLES)
    source = StepDataset(Reader(dataset, collator), engine.inputs, 0)
    planned = planner(GlobalBatch(tuple(range(SAMPLES))))
    batch = StepBatch.of(source.read(planned.step), planned.program, engine.rank)
    totals = engine.train_step(batch, 0)
    held = {n: p for n, p in engine.model.named_parameters() if n in engine.shards and p.requires_grad}
    mine = {n: engine.slices.updated(p) for n, p in held.items() if engine.shards[n].on_rank(engine.rank)}
    gradients = {
        n: whole(own.grad if own is held[n] else join(own.grad, own)).clone()
        for n, own in mine.items()
        if own.grad is not None
    }
    return {"loss": totals.loss, "norm": float(engine.gradient_norm()), "gradients": gradients}


def whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def shares(candidate: Candidate) -> bool:
    return bool(candidate.colocated_with)


def sizes(candidate: Candidate, size: str) -> set[int]:
    return {getattr(layout, size) for layout in candidate.layouts.values()}


KINDS = {
    "shared ranks, sequences of stages and copies": lambda c: shares(c) and len(sizes(c, "dp_size")) == 2,
    "shared ranks, tp on one side": lambda c: shares(c) and sizes(c, "tp_size") == {1, 2},
    "shared ranks, tokens cut on one side": lambda c: shares(c) and c.layouts[LANGUAGE_MODEL].cp_size == 2,
    "shared ranks, both recomputed": lambda c: shares(c) and sizes(c, "activation_checkpointing") == {True},
    "own ranks, tp on one side": lambda c: not shares(c) and sizes(c, "tp_size") == {1, 2},
    "own ranks, tokens cut": lambda c: not shares(c) and c.layouts[LANGUAGE_MODEL].cp_size == 2,
    "own ranks, uneven stages": lambda c: not shares(c) and sizes(c, "pp_size") == {1, 3},
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "freeze"), [("llava", "tower"), pytest.param("qwen3_vl", "nothing", marks=pytest.mark.deep)]
)
def test_what_the_search_can_return_equals_one_process(family: str, freeze: str):
    model = tiny_model(family, freeze)
    possible = candidates(problem_of(family, freeze, 4, model))
    random.Random(7).shuffle(possible)
    chosen = [candidate for kind in KINDS.values() for candidate in itertools.islice(filter(kind, possible), 1)]
    assert len(chosen) >= len(KINDS) - 1  # layers that hand over features can't be cut
    loss, count, gradients = reference(model, tiny.collate(family)(tiny.make_dataset(family, SAMPLES)))
    expected = {name: gradient / count for name, gradient in gradients.items()}
    norm = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    ranks = run_distributed(run_candidates, 4, family, freeze, chosen, timeout=120)
    for index, candidate in enumerate(chosen):
        found = [rank[index] for rank in ranks]
        for own in found:
            assert own["loss"] == pytest.approx(loss, rel=1e-5), str(candidate)
            assert own["norm"] == pytest.approx(norm, rel=1e-5), str(candidate)
            assert_close(own["gradients"], {name: expected[name] for name in own["gradients"]})
        assert set().union(*(own["gradients"] for own in found)) == set(expected), str(candidate)


def auto_run(family: str, parallel: Any, output_dir: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Our Trainer with a plan that it finds, on this rank; with what it prints."""
    printed = io.StringIO()
    with mock.patch.object(auto, "stderr_console", lambda: Console(file=printed, width=160)):
        trainer = runs.make_trainer(family, parallel, output_dir, **arguments)
    return {
        "run": runs.run_of(trainer),
        "plan": trainer.plan,
        "batch": (trainer.global_batch_size, trainer.args.per_device_train_batch_size),
        "printed": printed.getvalue(),
        "result": trainer.search and trainer.search.result and str(trainer.search.result.best.candidate),
    }


@pytest.mark.distributed
def test_auto_trains_as_the_stock_trainer_and_says_what_it_found(tmp_path: Path):
    stock = runs.stock("llava")
    found = run_distributed(
        auto_run, 2, "llava", "auto", str(tmp_path), global_batch_size=None, per_device_train_batch_size=4, timeout=90
    )
    runs.assert_same_run(found[0]["run"], stock)
    first, other = found
    assert first["plan"] == other["plan"] and first["plan"].world_size == 2
    assert first["batch"] == other["batch"] and first["batch"][0] == runs.GLOBAL_BATCH
    assert other["printed"] == "" and other["result"] is None
    assert first["printed"]
    plan = ParallelPlan.load(tmp_path / "plan.yaml")
    assert plan == first["plan"] and "<html" in (tmp_path / "plan.html").read_text()


SHARED = {
    "auto": True,
    "schedule": "eager",
    "modules": {
        "vision": {"freeze": "tower", "dp_size": 4, "activation_checkpointing": False},
        LANGUAGE_MODEL: {"dp_size": 1, "pp_size": 2, "tp_size": 2},
    },
}


@pytest.mark.distributed
def test_auto_keeps_to_what_is_set_and_shares_ranks_where_that_needs_it():
    stock = runs.stock("llava", freeze={"vision": "tower"})
    first, *_ = run_distributed(auto_run, 4, "llava", SHARED, global_batch_size=8, timeout=120)
    runs.assert_same_run(first["run"], stock)
    plan = first["plan"]
    vision = plan.modules["vision"]
    assert vision.layout.startswith("dp 4 x pp 1 x tp 1") and not vision.activation_checkpointing
    assert plan.modules[LANGUAGE_MODEL].layout == "dp 1 x pp 2 x tp 2" and plan.schedule == "eager"
    assert "on shared ranks" in first["result"]


@pytest.mark.distributed
def test_what_can_not_be_found_is_said_on_every_rank():
    fixed = {"auto": True, "modules": {LANGUAGE_MODEL: {"tp_size": 3}}}
    errors = assert_ranks_raise(runs.make_trainer, 2, "llava", fixed, match="language_model tp_size=3")
    assert len(set(errors)) == 1


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


def test_a_profile_of_layers_takes_the_place_of_counted_costs(tmp_path: Path):
    def prepare(path: str | None) -> CostModel:
        args = MultimodalTrainingArguments(output_dir=str(tmp_path), use_cpu=True, layer_profile=path)
        return prepare_model(tiny.FAMILIES["llava"](), args, MultimodalParallelPlugin(auto=True), World()).costs

    counted = prepare(None)
    slow = profile_of(counted.spec, {(LANGUAGE_MODEL, 0): 1000.0})
    slow.save(tmp_path / "profile.json")
    measured = prepare(str(tmp_path / "profile.json"))
    forward = slow.layers[0].curves["forward"].polynomial
    assert measured.layers.layer(LANGUAGE_MODEL, 0, 1).forward(10, 100) == pytest.approx(forward(10, 100))
    assert counted.layers.layer(LANGUAGE_MODEL, 0, 1).forward(10, 100) != pytest.approx(forward(10, 100))
    with pytest.raises(ValueError, match="`layer_profile='missing.json'`"):
        prepare("missing.json")


def test_a_described_device_takes_the_place_of_the_ranks_own(tmp_path: Path):
    def device(**settings: Any) -> Hardware:
        args = MultimodalTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **settings)
        return prepare_model(tiny.FAMILIES["llava"](), args, MultimodalParallelPlugin(auto=True), World()).costs.device

    path = tmp_path / "gpu.yaml"
    path.write_text("like: l40s\nname: my-gpu\nmemory_gib: 40.5\n")
    assert device() == find_device("cpu").computing_in("float32")
    found = device(gpu_spec=str(path))
    assert found.name == "my-gpu" and found.memory_gib == 40.5 and found.peak_tflops == find_device("l40s").fp32_tflops
    assert device(gpu_spec=str(path), bf16=True).peak_tflops == find_device("l40s").bf16_tflops
    with pytest.raises(ValueError, match="`gpu_spec=missing.yaml`"):
        device(gpu_spec="missing.yaml")


def test_products_of_float32_in_tf32_have_a_peak_of_their_own(tmp_path: Path):
    args = MultimodalTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    half = MultimodalTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True)
    spec = build_model_spec(tiny.FAMILIES["llava"]())
    assert compute_dtype(spec, args) == "float32" and compute_dtype(spec, half) == "bfloat16"
    with products_in("tf32"):
        assert compute_dtype(spec, args) == "tf32" and compute_dtype(spec, half) == "bfloat16"
    whole = build_model_spec(tiny.FAMILIES["llava"]().to(torch.float16))
    assert compute_dtype(whole, args) == "float16"


def prepared_of(model: Any) -> PreparedModel:
    spec = build_model_spec(model)
    return PreparedModel(model, spec, analytic_costs(spec, find_device("cpu"), 4))


def test_sizes_that_a_model_can_not_have_are_not_tried():
    model = tiny.FAMILIES["llava"]()

    def found(plugin: MultimodalParallelPlugin) -> dict[str, dict[str, int]]:
        return possible_sizes(model, build_model_spec(model), plugin)

    fixed = {"auto": True, "modules": {LANGUAGE_MODEL: {"tp_size": 1}}}
    assert found(MultimodalParallelPlugin.from_any(fixed)) == {LANGUAGE_MODEL: {"tp_size": 1}}
    model.config.vision_feature_layer = [-4, -2]
    eager = MultimodalParallelPlugin({LANGUAGE_MODEL: ModulePlugin(attn_implementation="eager")}, auto=True)
    assert found(eager) == {"vision": {"pp_size": 1}, LANGUAGE_MODEL: {"cp_size": 1}}
    adapters = LoraConfig(target_modules=["q_proj"], use_dora=True)
    add_adapters(model, build_model_spec(model), {LANGUAGE_MODEL: adapters})
    assert found(eager)[LANGUAGE_MODEL] == {"tp_size": 1, "cp_size": 1}


def test_sizes_that_stages_of_a_module_can_have_together():
    """Powers of two that divide heads and columns; one size where it is given, or where others can't be."""
    model = tiny.FAMILIES["llava"]()  # 4 heads; 2 key and value heads in the language model

    def found(modules: dict[str, Any], node_size: int = 8) -> dict[str, tuple[int, ...]]:
        plugin = MultimodalParallelPlugin.from_any({"auto": True, "modules": modules})
        return stage_tp_sizes(model, build_model_spec(model), plugin, node_size)

    assert found({}) == {"vision": (1, 2, 4), LANGUAGE_MODEL: (1, 2)}
    assert found({}, 3) == {"vision": (1, 2), LANGUAGE_MODEL: (1, 2)}
    assert found({}, 1) == {"vision": (1,), LANGUAGE_MODEL: (1,)}
    assert found({"vision": {"tp_size": 1}, LANGUAGE_MODEL: {"tp_size": 2}}) == {"vision": (1,), LANGUAGE_MODEL: (2,)}
    assert found({LANGUAGE_MODEL: {"cp_size": 2}})[LANGUAGE_MODEL] == (1,)
    vision = build_model_spec(model).modules["vision"]
    odd = replace(vision.parameters[0], name="odd", shape=(6, 3), tp_dim=0)
    spec = ModelSpec({"vision": replace(vision, parameters=(*vision.parameters, odd))})
    plugin = MultimodalParallelPlugin(auto=True)
    assert stage_tp_sizes(model, spec, plugin, 8) == {"vision": (1,)}, "the model does not cut it as described"
    other = ModelSpec({"vision": replace(spec.modules["vision"], stack="elsewhere")})
    assert stage_tp_sizes(model, other, plugin, 8) == {"vision": (1, 2)}, "4 does not divide 6"
    adapters = LoraConfig(target_modules=["q_proj"], use_dora=True)
    add_adapters(model, build_model_spec(model), {LANGUAGE_MODEL: adapters})
    assert found({})[LANGUAGE_MODEL] == (1,)


def test_a_checkpoint_brings_its_plan_unless_it_does_not_fit(tmp_path: Path):
    prepared = prepared_of(tiny.FAMILIES["llava"]())
    plan = resolve_plan(prepared.spec, {"vision": ModulePlugin(dp_size=2)}, num_microbatches=4)
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    plan.save(folder / "parallel_plan.json")

    def args(**changes: Any) -> Any:
        given = {"resume_from_checkpoint": str(folder), "world_size": 3, "output_dir": str(tmp_path), **changes}
        return SimpleNamespace(**given)

    plugin = MultimodalParallelPlugin(auto=True)
    for resumed in (str(folder), "true", True):
        found, sentence = saved_plan(prepared, plugin, args(resume_from_checkpoint=resumed))
        assert found == plan and sentence
    assert saved_plan(prepared, plugin, args(resume_from_checkpoint=None)) == (None, "")
    found, sentence = saved_plan(prepared, plugin, args(world_size=4))
    assert found is None and "but 4 were" in sentence
    fixed = MultimodalParallelPlugin.from_any({"auto": True, "modules": {"vision": {"pp_size": 2}}})
    assert "`pp_size=2`" in saved_plan(prepared, fixed, args())[1]


class KnownSizes(TrainingSizes):
    """Sizes that a source knows, or none."""

    def __init__(self, run: RunContext, source: Any):
        super().__init__(run)
        self.source = source

    def of_rank(self, dataset: Any) -> Any:
        return self.source


class Rows(IterableDataset):
    """Tiny samples as a stream without a length."""

    def __iter__(self):
        yield from tiny.make_dataset("llava", 5)


def test_samples_that_tell_no_size_count_like_the_mean_of_the_first():
    model = tiny.FAMILIES["llava"]()
    collator = tiny.collate("llava")

    def measured(dataset: Any, source: Any = None) -> tuple[bool, dict[str, list[int]]]:
        spec = build_model_spec(model)
        run = replace(context(dataset), spec=spec, drop_columns=lambda dataset, description: (dataset, collator))
        found = training_samples(KnownSizes(run, source), 6).measured
        assert found is not None
        return found.known, {name: tokens.tolist() for name, tokens in found.tokens.items()}

    mean = (False, {LANGUAGE_MODEL: [24] * 6, "vision": [5] * 6})
    assert measured(tiny.make_dataset("llava", 5)) == measured(Rows()) == mean
    known = SampleSizes.uniform({LANGUAGE_MODEL: 7, "vision": 3}, 5, known=True)
    assert measured(Rows(), known.take) == (True, {LANGUAGE_MODEL: [7] * 5, "vision": [3] * 5})
    with pytest.raises(ValueError, match="`train_dataset`"):
        training_samples(TrainingSizes(context(None)), 8)
