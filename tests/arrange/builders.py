"""Plans, and work of samples, for the tests of arrangements."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, ParallelPlan, StepPlan, Workloads, resolve_plan
from hf_mmparallel.plan.parallel_plan import Schedule
from tests.plan.specs import language_spec, vision_spec

IMAGE, AUDIO = "image_generator", "audio_generator"
LARGEST = 4.0


def plan_of(schedule: Schedule = "1f1b", **plugins: ModulePlugin | int) -> ParallelPlan:
    """Modules of eight layers each, with these settings or numbers of replicas; those with features are encoders."""
    modules = {}
    for name in plugins:
        part = language_spec(8) if name == LANGUAGE_MODEL else vision_spec(8)
        features = () if name in (LANGUAGE_MODEL, IMAGE, AUDIO) else part.features
        modules[name] = dataclasses.replace(part, name=name, features=features)
    settings = {name: ModulePlugin(own) if isinstance(own, int) else own for name, own in plugins.items()}
    return resolve_plan(ModelSpec(modules), settings, schedule=schedule)


def workloads_of(**forward_ms: ArrayLike) -> Workloads:
    """These milliseconds of each sample, and as many tokens."""
    times = {name: np.asarray(own, dtype=float) for name, own in forward_ms.items()}
    tokens = {name: own.astype(np.int64) for name, own in times.items()}
    return Workloads(times, dict.fromkeys(times, 2.0), tokens, {})


def draw(plan: ParallelPlan, num_samples: int, seed: int = 0, text: float = 0.2) -> Workloads:
    """Work with a tail up to `LARGEST`, independent in all modules; a part `text` has none in each but the last."""
    rng = np.random.default_rng(seed)
    forward = {name: np.minimum(rng.lognormal(0, 0.7, num_samples), LARGEST) for name in plan.modules}
    for name in list(forward)[:-1]:
        forward[name][rng.random(num_samples) < text] = 0
    tokens = {name: np.ceil(100 * own).astype(np.int64) for name, own in forward.items()}
    return Workloads(forward, dict.fromkeys(forward, 2.0), tokens, {})


def odd_workloads(plan: ParallelPlan, kind: str) -> Workloads:
    """Random work, but for what `kind` says."""
    work = draw(plan, {"none": 0, "one": 1, "few": 3}.get(kind, 24), text=0.0)
    for name, own in work.forward_ms.items():
        if kind == "nothing to do" or (kind == "text" and name != LANGUAGE_MODEL):
            own[:] = 0
        if kind == "no text" and name == LANGUAGE_MODEL:
            own[:] = 0
        if kind == "little text" and name == LANGUAGE_MODEL:
            own[: 2 * len(own) // 3] = 0
        if kind == "giant":
            own[len(own) // 2] = 1000.0
    return work


def loads(microbatches, weights: NDArray) -> NDArray:
    """Sums `[replicas, microbatches]`."""
    return np.array([[weights[list(batch_indices)].sum() for batch_indices in replica] for replica in microbatches])


def batch_indices_of(replicas) -> list[int]:
    """The batch indices of all microbatches, in their order."""
    return [index for microbatches in replicas for batch_indices in microbatches for index in batch_indices]


def check_samples(plan: ParallelPlan, work: Workloads, step: StepPlan) -> None:
    """All samples are once in each module in which they have work, and in the language model."""
    step.check(plan)
    for name, replicas in step.microbatches.items():
        busy = np.flatnonzero((work.forward_ms[name] > 0) | (name == LANGUAGE_MODEL))
        assert sorted(batch_indices_of(replicas)) == busy.tolist()
