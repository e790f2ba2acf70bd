"""Random plans, and the predicted and measured times of steps that run under them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
from common import IGNORE_INDEX, IMAGE_TOKEN
from modelled import collate, message_ms, sleep_instead, timed_step, tiny_model, tiny_samples
from planner_frozen import ScaledLayers
from scipy.stats import rankdata

from hf_mmparallel.cost import CostModel, Hardware, StepCost, analytic_costs, batch_workloads, find_device, layer_table
from hf_mmparallel.cost.profile import LayerProfile, measured_costs
from hf_mmparallel.cost.step_planner import PlannedStep, StepPlanner
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes, sync_groups
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.plan.resolve import check_plan
from hf_mmparallel.planning.layer_profile import ProfileSettings, profile_layers
from hf_mmparallel.planning.problem import Candidate
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import simulate
from hf_mmparallel.world import World

FROZEN = ((), ("tower",), (LANGUAGE_MODEL,))
PROBED, CALM = 4, 1.05


@dataclass(frozen=True)
class Sizes:
    """
    Sizes of the benchmark.

    Args:
        plans (`int`): Random plans of each kind.
        repeats (`int`): Measured steps of each.
        batch (`int`): Samples of a global batch.
        length (`int`): Tokens of a sample in the language model, all alike so that nothing is padded.
        step_ms (`float`): What a step that sleeps takes on one rank for each of all ranks, about.
        budget_s (`float`): Time in which a chunk of a layer is profiled.
    """

    plans: int = 10
    repeats: int = 8
    batch: int = 16
    length: int = 256
    step_ms: float = 1000.0
    budget_s: float = 0.3


QUICK = Sizes(plans=2, repeats=1, batch=4, length=16, step_ms=100.0, budget_s=0.005)
SHAPES = common.Shapes(vision_width=192, vision_layers=6, width=192, layers=6, image_size=56, max_images=4)
QUICK_SHAPES = common.QUICK


# Random plans


def random_candidate(rng: random.Random, spec: ModelSpec, num_ranks: int, batch: int) -> Candidate:
    """A plan of all ranks that the engine runs, whatever it is worth."""
    while True:
        hosts = _random_hosts(rng, spec)
        homes = [name for name in spec.modules if name not in hosts]
        cuts = sorted(rng.sample(range(1, num_ranks), len(homes) - 1))
        ranks = dict(zip(homes, np.diff([0, *cuts, num_ranks]).tolist(), strict=True))
        layouts = {}
        for name, module in spec.modules.items():
            layouts[name] = _random_layout(rng, module.num_layers, ranks[hosts.get(name, name)])
        dp_size = layouts[LANGUAGE_MODEL].dp_size
        counts = [count for count in (2, 4, 8) if batch % (dp_size * count) == 0]
        schedule = rng.choice(("1f1b", "1f1b", "gpipe"))
        with suppress(IndexError, ValueError):  # sizes that do not go together
            candidate = Candidate(layouts, hosts, rng.choice(counts), schedule)
            if all(dp_size % own.dp_size == 0 or own.dp_size % dp_size == 0 for own in layouts.values()):
                check_plan(candidate.plan(spec), spec)
                return candidate


def _random_hosts(rng: random.Random, spec: ModelSpec) -> dict[str, str]:
    """Encoders on the ranks of the language model, together, or on separate ranks."""
    encoders = list(spec.encoders)
    if len(encoders) > 1 and rng.random() < 0.3:
        return dict.fromkeys(encoders[1:], encoders[0])
    return {name: LANGUAGE_MODEL for name in encoders if rng.random() < 0.5}


def _random_layout(rng: random.Random, num_layers: int, num_ranks: int) -> ModuleLayout:
    sizes = [
        (dp, tp, num_ranks // (dp * tp))
        for dp in range(1, num_ranks + 1)
        for tp in (1, 2)
        if num_ranks % (dp * tp) == 0 and num_ranks // (dp * tp) <= num_layers
    ]
    dp_size, tp_size, pp_size = rng.choice(sizes)
    ends = sorted(rng.sample(range(1, num_layers), pp_size - 1))
    layers = tuple(np.diff([0, *ends, num_layers]).tolist())
    return ModuleLayout(layers, dp_size, 1, tp_size, rng.random() < 0.25)


# Steps that compute


def make_samples(shapes: common.Shapes, length: int, count: int) -> tuple[list[dict[str, torch.Tensor]], SampleSizes]:
    """Samples of some images and a text that fills them up to one length, and their sizes."""
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    samples, lengths = [], {"vision": [], LANGUAGE_MODEL: []}
    for _ in range(count):
        images = rng.randint(0, min(shapes.max_images, (length - 8) // shapes.image_tokens))
        text = torch.randint(2, shapes.vocab_size, (length - images * shapes.image_tokens,), generator=generator)
        ids = torch.cat([torch.full((images * shapes.image_tokens,), IMAGE_TOKEN), text])
        sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        sample["labels"] = ids.masked_fill(ids == IMAGE_TOKEN, IGNORE_INDEX)
        if images:
            side = (shapes.image_size, shapes.image_size)
            sample["pixel_values"] = torch.randn(images, 3, *side, generator=generator)
        samples.append(sample)
        lengths["vision"].append([shapes.image_tokens] * images)
        lengths[LANGUAGE_MODEL].append([length])
    return samples, SampleSizes.of_sequences(lengths)


def freeze(model: Any, what: Sequence[str]) -> None:
    """Freezes the encoder's tower or the language model."""
    spec = build_model_spec(model)
    patterns = {"tower": f"{spec.modules['vision'].tower}.", LANGUAGE_MODEL: spec.language_model.tower + "."}
    for name, parameter in model.named_parameters():
        frozen = any(name.startswith(patterns[part]) for part in what)
        parameter.requires_grad_(not (frozen or (LANGUAGE_MODEL in what and name.startswith("lm_head"))))


def write_profile(shapes: common.Shapes, sizes: Sizes, path: Path) -> None:
    """Times the layers of the model on one thread of this process alone, whole and in halves."""
    torch.set_num_threads(1)
    settings = ProfileSettings(tp_sizes=(1, 2), lengths=(64, 256, 1024), budget_s=sizes.budget_s)
    profile_layers(common.build_model(shapes).config, settings).save(path)


def measured_link() -> Hardware:
    """This machine as a device: what two ranks sum together in a second over gloo, measured with a large tensor."""
    tensor = torch.zeros(2**18)
    times = []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    seconds = [statistics.median(times)]
    dist.broadcast_object_list(seconds, src=0)
    # A sum over two ranks takes each of them as many bytes as the tensor has.
    rate = tensor.numel() * tensor.element_size() / seconds[0] / 1e9
    return replace(find_device("cpu"), link_gb_per_s=rate, node_link_gb_per_s=rate)


def planned(costs: CostModel, candidate: Candidate, sizes: SampleSizes) -> tuple[StepPlanner, PlannedStep]:
    """The step of a batch under a plan, arranged as in training."""
    plan = candidate.plan(costs.spec)
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    size = -(-sizes.num_samples // (dp_size * candidate.num_microbatches))
    groups = sync_groups(costs.spec, plan)
    planner = StepPlanner(costs, plan, groups, size, "hierarchical", lambda _: sizes)
    return planner, planner(GlobalBatch(tuple(range(sizes.num_samples))))


def real_plans(shapes: common.Shapes, sizes: Sizes, profile: Path) -> dict[str, Any]:
    """Plans that compute on two ranks: predicted from the profile of the layers, and measured."""
    samples, known = make_samples(shapes, sizes.length, sizes.batch)
    device = measured_link()
    rng = random.Random(0)
    prepared: dict[str, Prepared] = {}
    seen = set()
    while len(prepared) < sizes.plans:
        model = common.build_model(shapes).train()
        frozen = FROZEN[len(prepared) % len(FROZEN)]
        freeze(model, frozen)
        spec = build_model_spec(model)
        candidate = random_candidate(rng, spec, dist.get_world_size(), sizes.batch)
        name = f"{candidate}; frozen: {', '.join(frozen) or 'nothing'}"
        stages = tuple((own.dp_size, own.tp_size, own.layers) for own in candidate.layouts.values())
        if stages not in seen:
            seen.add(stages)
            costs = measured_costs(spec, device, LayerProfile.load(profile))
            planner, step = planned(costs, candidate, known)
            prepared[name] = prepare(model, planner, step, samples, common.collate)
            prepared[name].predicted_ms = planner.predict(step).step_ms
    probe = Probe(shapes, samples, known, LayerProfile.load(profile))
    return {"link_gb_per_s": device.link_gb_per_s, **figures(measured(prepared, sizes.repeats, probe))}


@dataclass
class Prepared:
    """
    A plan that is ready to run.

    Args:
        engine (`ParallelEngine`): The model under the plan.
        batch (`StepBatch`): The samples.
        predicted_ms (`float`, *optional*, defaults to 0.0): A step by the costs.
    """

    engine: ParallelEngine
    batch: StepBatch
    predicted_ms: float = 0.0


def prepare(model: Any, planner: StepPlanner, step: PlannedStep, samples: Any, collator: Any) -> Prepared:
    """The engine of a plan with the samples and the program of a step."""
    engine = ParallelEngine(model, planner.costs.spec, planner.plan, World())
    data = StepDataset(Reader(samples, collator), engine.inputs, 0).read(step.step)
    return Prepared(engine, StepBatch.of(data, step.program, engine.rank))


class Probe:
    """
    How much slower than in the profile the machine is at the moment: what the whole model takes for a few samples, on
    every rank at the same time, over the sum of its layers.

    Args:
        shapes (`common.Shapes`): The model.
        samples (`Sequence[dict[str, torch.Tensor]]`): Samples, of which the first are taken.
        sizes (`SampleSizes`): Their sizes.
        profile (`LayerProfile`): Of the layers.
    """

    def __init__(self, shapes: common.Shapes, samples: Sequence[Any], sizes: SampleSizes, profile: LayerProfile):
        self.model = common.build_model(shapes).train()
        self.batch = common.collate(samples[:PROBED])
        spec = build_model_spec(self.model)
        costs = measured_costs(spec, find_device("cpu"), profile)
        self.expected_ms = 0.0
        for name in spec.modules:
            table = layer_table(costs, name)
            chunk = [sizes.squares[name][:PROBED].sum(), sizes.tokens[name][:PROBED].sum(), 1.0]
            self.expected_ms += float(((table.forward + table.backward) @ chunk).sum())

    def __call__(self) -> float:
        """The mean over the ranks."""
        dist.barrier()
        start = time.perf_counter()
        self.model(**self.batch).loss.backward()
        self.model.zero_grad()
        ratio = torch.tensor(1e3 * (time.perf_counter() - start) / self.expected_ms)
        dist.all_reduce(ratio)
        return float(ratio) / dist.get_world_size()


def measured(prepared: Mapping[str, Prepared], repeats: int, probe: Callable[[], float]) -> list[dict[str, Any]]:
    """All plans in turns, one step each, and how slow the machine was around it."""
    times: dict[str, list[float]] = {name: [] for name in prepared}
    slower: dict[str, list[float]] = {name: [] for name in prepared}
    for index in range(1 + repeats):
        before = probe()
        for name, own in prepared.items():
            time_ms, after = timed_step(own.engine, own.batch, index), probe()
            if index:
                times[name].append(time_ms)
                slower[name].append((before + after) / 2)
            before = after
    return [_row(name, own.predicted_ms, times[name], slower[name]) for name, own in prepared.items()]


def _row(plan: str, predicted_ms: float, times_ms: list[float], slower: list[float]) -> dict[str, Any]:
    """`measured_ms` is that of the steps around which the machine was least disturbed, at the speed of the profile."""
    calm = [time_ms / ratio for time_ms, ratio in zip(times_ms, slower, strict=True) if ratio <= CALM * min(slower)]
    row = {"plan": plan, "predicted_ms": predicted_ms, "measured_ms": statistics.median(calm)}
    return {**row, "unscaled_ms": times_ms, "slower": slower}


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank correlation and errors of predictions."""
    predicted, measured = (np.array([row[key] for row in rows]) for key in ("predicted_ms", "measured_ms"))
    errors = np.abs(predicted / measured - 1)
    correlation = np.corrcoef(rankdata(predicted), rankdata(measured))[0, 1]
    return {
        "rank_correlation": float(correlation),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "plans": list(rows),
    }


# Steps that sleep


def drawn_sizes(count: int) -> SampleSizes:
    """Samples that differ: an image and a clip of any size, and their text."""
    rng = np.random.default_rng(0)
    lengths = {
        "vision": np.rint(900 * np.exp(0.5 * rng.standard_normal(count))),
        "audio": np.rint(500 * np.exp(0.7 * rng.standard_normal(count))),
    }
    lengths[LANGUAGE_MODEL] = lengths["vision"] // 4 + lengths["audio"] // 4 + rng.integers(100, 500, count)
    return SampleSizes.of_sequences({name: [[int(n)] for n in values] for name, values in lengths.items()})


def slept_plans(sizes: Sizes) -> dict[str, Any]:
    """Plans on all ranks whose tasks sleep for what the cost model says."""
    count = 2 * sizes.batch
    known = drawn_sizes(count)
    rng = random.Random(dist.get_world_size())
    travel_ms = message_ms(16)
    prepared: dict[str, Prepared] = {}
    while len(prepared) < sizes.plans:
        model = tiny_model().train()
        spec = build_model_spec(model)
        candidate = random_candidate(rng, spec, dist.get_world_size(), count)
        if str(candidate) in prepared:
            continue
        costs = slow_costs(spec, known, sizes.step_ms * dist.get_world_size())
        planner, step = planned(costs, candidate, known)
        own = prepared[str(candidate)] = prepare(model, planner, step, tiny_samples(count), collate)
        cost = StepCost(costs, planner.plan, step.step, known, planner.sync_groups)
        tasks = {a.task for actions in step.program.actions.values() for a in actions if a.task is not None}
        sleep_instead(own.engine, {task: cost(task) for task in tasks})
        own.predicted_ms = simulate(planner.representatives, step.step, cost, travel_ms).iteration_ms
    return {"message_ms": travel_ms, **figures(measured(prepared, sizes.repeats, lambda: 1.0))}


def slow_costs(spec: ModelSpec, sizes: SampleSizes, total_ms: float) -> CostModel:
    """Operation counts, slowed down until a batch takes so long on one rank; encoders and language model alike."""
    counted = analytic_costs(spec, find_device("cpu"))
    plan = Candidate(
        {name: ModuleLayout((module.num_layers,)) for name, module in spec.modules.items()},
        dict.fromkeys(spec.encoders, LANGUAGE_MODEL),
    ).plan(spec)
    work = batch_workloads(counted, plan, sizes)
    factors = {
        name: total_ms / len(spec.modules) / float(values.sum() * (1 + work.backward_ratio[name]))
        for name, values in work.forward_ms.items()
    }
    return replace(counted, layers=ScaledLayers(counted.layers, factors, {}))
