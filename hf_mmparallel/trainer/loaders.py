"""Data loaders of a run under a plan: each item is a step of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler, prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from ..arrange.rank_batches import RANK_ARRANGEMENTS
from ..cost import CostModel
from ..cost.arrangement_choice import DEFAULT_ARRANGEMENT
from ..cost.step_planner import RankPlanner, SizeFunction, StepPlanner
from ..data.global_batches import DataPosition, EvenOrder, GlobalBatchSampler, LengthGroups, RankBatchSampler
from ..data.measured_batches import MeasuredBatchSampler
from ..data.media import readers
from ..data.step_dataset import StepDataset, as_is
from ..data.streams import StreamSampler, StreamWindow, is_stream
from ..plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from ..plan.methods import arrangement_name
from ..runtime.engine import ParallelEngine
from ..world import World
from .arguments import AUTO, MultimodalTrainingArguments
from .preemption_callback import leave_signals_to_rank
from .start_checks import check_dataset
from .training_sizes import CommonSizes, Mark, MemoryRatio, RunContext, TrainingSizes, allocated_since, allowed_bytes

SamplerOf = Callable[[Any], Any]  # dataset -> its sampler, such as `Trainer._get_train_sampler`


@dataclass(frozen=True)
class TrainingLoader:
    """The loader of the training steps, and how they are planned."""

    loader: StepLoader  # yields a [`StepBatch`] for each global batch
    run_planner: StepPlanner  # plans the steps as the loader does, for callbacks and errors
    memory_ratio: MemoryRatio | None  # corrects limits of microbatches by the memory of the first steps
    typical: SampleSizes | None = None  # of a global batch, by which limits are computed

    @property
    def dataset(self) -> StepDataset:
        dataset: Any = self.loader.dataset
        return dataset

    def with_plan(self, engine: ParallelEngine) -> TrainingLoader:
        """The same for the plan that an engine has now; the loader changes in place."""
        planner = replace(self.run_planner, plan=engine.plan, sync_groups=engine.sync_groups)
        if self.typical is not None:
            planner = replace(planner, token_limits=None).with_token_limits(self.typical)
        follow_plan(self.loader, engine, planner)
        global_batches: Any = self.loader.batch_sampler
        if isinstance(global_batches, MeasuredBatchSampler):
            global_batches.measure_anew(engine.world)
        return replace(self, run_planner=planner)

    def items_after(self, position: DataPosition) -> Iterator[Any]:
        global_batches: Any = self.loader.batch_sampler
        epoch = global_batches.epoch
        drawn = position.num_samples if position.epoch == epoch else 0
        global_batches.resume(epoch, drawn, 0)
        with torch.random.fork_rng(devices=()):  # an iterator draws a seed that nothing here depends on
            return self.loader.new_items()


class StepLoader(DataLoader):
    # Runs what starts to read, again if ranks are lost in it: with workers, which read ahead, ranks exchange the sizes
    # of the first samples.
    repeated: Callable[[Callable[[], Any]], Any] = staticmethod(lambda work: work())

    def __iter__(self) -> Any:
        return self.repeated(self.new_items)

    def new_items(self) -> Any:
        return super().__iter__()


def follow_plan(loader: DataLoader, engine: ParallelEngine, planner: StepPlanner | None = None) -> None:
    """Lets a loader, in place, plan its steps for the plan that an engine has now, by default as before."""
    steps: Any = loader.dataset
    if steps.inputs is engine.inputs:
        return
    if planner is None:
        planner = replace(steps.planner, plan=engine.plan, sync_groups=engine.sync_groups)
    elif steps.planner.sizes is None:
        planner = replace(planner, sizes=None)  # global batches bring sizes
    steps.inputs, steps.planner = engine.inputs, planner
    loader._iterator = None  # of workers that persist, and know the plan before
    global_batches: Any = loader.batch_sampler
    global_batches.set_epoch(global_batches.epoch)  # a sampler that was read to its end is at the next one


class StepLoaders:
    def __init__(self, context: RunContext, engine: ParallelEngine, global_batch_size: int):
        self.context = context
        self.engine = engine
        self.global_batch_size = global_batch_size
        self.args: Any = context.args

    def training(
        self, sampler_of: SamplerOf, sizes: TrainingSizes, arrangement: str, learned: Mark | None = None
    ) -> TrainingLoader:
        """Loads the training set in the stock Trainer's order, arranged as the arguments say. Collective."""
        dataset = self.context.train_dataset
        if dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        check_dataset(dataset)
        dataset = self._windowed(dataset, self.args.dataloader_drop_last)
        order = self._training_order(dataset, sampler_of)
        # for arguments that name no arrangement; that of rank 0 counts
        agreed = self.context.world.from_first_rank(lambda: arrangement)
        shared = sizes.common_sizes(dataset, self.global_batch_size)
        base = base_planner(self.engine, self.args.per_device_train_batch_size)
        run_planner = training_planner(base, self.args, shared.source, agreed)
        if shared.typical is not None:
            run_planner = run_planner.with_token_limits(shared.typical)
        memory_ratio = self._memory_ratio(run_planner, shared, learned)
        limits_of = None if memory_ratio is None else memory_ratio.limits_of
        drop_last = self.args.dataloader_drop_last
        global_batches = GlobalBatchSampler(order, self.global_batch_size, drop_last, limits_of)
        # Callbacks and errors plan steps of their own with `run_planner`. The loader's is sent to workers: it has no
        # source of sizes where global batches bring them.
        loader_planner = run_planner
        if shared.is_measured_by_batch:
            global_batches = with_sizes(global_batches, dataset, shared, self.context)
            loader_planner = replace(run_planner, sizes=None)
        loader = self._loader(dataset, global_batches, loader_planner, "Training")
        return TrainingLoader(loader, run_planner, memory_ratio, shared.typical)

    def evaluation(self, dataset: Any, sampler_of: SamplerOf, description: str) -> DataLoader:
        """Loads a dataset in its order, in batches with enough microbatches to fill the pipeline."""
        check_dataset(dataset)
        plan = self.engine.plan
        depth = max(len(stages) for module in plan.modules.values() for stages in module.replicas)
        size = self.args.per_device_eval_batch_size
        # A forward pipeline of `depth` stages idles for depth - 1 of the microbatches + depth - 1 turns: with twice as
        # many microbatches as stages for at most a third of the time. More, as in a training step, waste less; without
        # backwards none is kept, so that their number costs memory of the host only.
        count = size * max(2 * depth * plan.modules[LANGUAGE_MODEL].dp_size, plan.total_microbatches)
        dataset = self._windowed(dataset, drop_last=False)
        if isinstance(dataset, StreamWindow):
            order: Any = StreamSampler(dataset)
        else:
            order = self._seeded(sampler_of(dataset) or SequentialSampler(dataset))
            order = EvenOrder(order, size, self.args.dataloader_drop_last, fills=False)
        planner = replace(base_planner(self.engine, size), training=False)
        return self._loader(dataset, GlobalBatchSampler(order, count), planner, description)

    def _training_order(self, dataset: Any, sampler_of: SamplerOf) -> Any:
        """The order of the stock Trainer on one process."""
        if isinstance(dataset, StreamWindow):
            return StreamSampler(dataset)
        sampler = sampler_of(dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return LengthGroups(sampler, self.global_batch_size, self.context.world.from_first_rank)
        return self._seeded(sampler)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _seeded(self, sampler: Any) -> Any:
        """The sampler that accelerate makes of a random one."""
        if not isinstance(sampler, RandomSampler):
            return sampler
        if not self.args.accelerator_config.use_seedable_sampler:
            return _FirstRanksOrder(sampler, self.context.world)
        return SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=torch.Generator(),
            data_seed=self._data_seed,
        )

    def _windowed(self, dataset: Any, drop_last: bool) -> Any:
        if not is_stream(dataset):
            return dataset
        carries_rows = self.args.on_bad_sample == "skip" and self.args.dataloader_num_workers > 0
        return StreamWindow(dataset, self.args.seed, drop_last, carries_rows)

    def _memory_ratio(self, planner: StepPlanner, sizes: CommonSizes, learned: Mark | None) -> MemoryRatio | None:
        """The memory ratio, if the arguments ask for it and limits depend on memory."""
        if self.args.memory_limit_gib != AUTO or planner.memory_bytes is None or sizes.typical is None:
            return None
        measure = functools.partial(allocated_since, self.engine.device)
        return MemoryRatio(planner, sizes.typical, measure, learned)

    def _loader(
        self, dataset: Any, global_batches: GlobalBatchSampler, planner: StepPlanner, description: str
    ) -> StepLoader:
        engine, args = self.engine, self.args
        workers = args.dataloader_num_workers
        dataset, collator = self.context.drop_columns(dataset, description)
        modules = readers(dataset, collator, engine.spec, engine.encoder_inputs)
        window = dataset if isinstance(dataset, StreamWindow) else None
        steps = StepDataset(modules, engine.inputs, args.seed, planner, window)
        order: Any = global_batches
        return StepLoader(
            steps,
            batch_sampler=order,
            collate_fn=as_is,
            num_workers=workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=functools.partial(
                _start_worker,
                num_workers=workers,
                rank=args.process_index,
                leaves_signals=args.save_on_preemption or args.resilience is not None,
            ),
        )


def _start_worker(index: int, num_workers: int, rank: int, leaves_signals: bool) -> None:
    seed_worker(index, num_workers, rank)
    if leaves_signals:
        leave_signals_to_rank()


def with_sizes(
    global_batches: GlobalBatchSampler, dataset: Any, sizes: CommonSizes, context: RunContext
) -> MeasuredBatchSampler:
    """Returns global batches with the sizes of their samples, of which each rank measures a share."""
    args = context.args
    return MeasuredBatchSampler(
        global_batches,
        sizes.source,
        dataset,
        sizes.median or SampleSizes.uniform(dict.fromkeys(context.spec.modules, 1), 1),
        context.world,
        args.dataloader_num_workers,
        args.dataloader_multiprocessing_context,
    )


class _FirstRanksOrder:
    """The random order that rank 0 draws by torch's global generator, as the stock Trainer does, on all ranks."""

    def __init__(self, sampler: RandomSampler, world: World):
        self.sampler = sampler
        self.world = world

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.world.from_first_rank(lambda: list(self.sampler)))


def check_loader(loader: Any, method: str) -> None:
    """Raises `ValueError` for a loader that is not this package's; `method` has returned it, maybe as an override."""
    if not isinstance(getattr(loader, "dataset", None), StepDataset):
        raise ValueError(
            f"`{method}` returned a `{type(loader).__name__}` of batches, but under a plan steps are arranged over "
            "the ranks by a loader of its own. Return what the inherited method returns; another order, other "
            "batches and other samples come from `_get_train_sampler`, a `data_collator` and a dataset."
        )


def base_planner(engine: ParallelEngine, microbatch_size: int) -> StepPlanner:
    """Plans steps of an engine, with `microbatch_size` samples in a microbatch of one language-model replica."""
    return StepPlanner(engine.costs, engine.plan, engine.sync_groups, microbatch_size)


def training_planner(
    planner: StepPlanner, args: MultimodalTrainingArguments, sizes: SizeFunction | None, arrangement: str | None = None
) -> StepPlanner:
    """Plans training steps by the arguments; `arrangement` is for those that name none."""
    return replace(
        planner,
        arrangement=args.microbatch_assignment or arrangement or DEFAULT_ARRANGEMENT,
        sizes=sizes,
        max_tokens=args.max_tokens_per_microbatch,
        memory_bytes=allowed_bytes(args, planner.costs.device),
    )


# The training loader of a run without a plan whose samples are arranged over ranks and accumulation steps.

_OWN_BATCHES = "ranks would not get the batches that samples are arranged in"


def check_arrangement(trainer: Any) -> None:
    """Raises `ValueError` for what `microbatch_assignment` can't be used with in a run without a plan."""
    args, config = trainer.args, trainer.args.accelerator_config
    if not (callable(args.microbatch_assignment) or args.microbatch_assignment in RANK_ARRANGEMENTS):
        raise _refusal(
            args,
            "it orders microbatches for the stages of a pipeline, and without a plan there are none",
            f"Use one of {', '.join(RANK_ARRANGEMENTS)}",
        )
    mesh_size = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    refused = (
        (
            is_stream(trainer.train_dataset),
            "the samples of a stream have no indices",
            "Leave it out",
        ),
        (
            args.train_sampling_strategy == "batch_rebalance",
            "`train_sampling_strategy='batch_rebalance'` arranges the samples itself",
            "Use `microbatch_assignment='batch_rebalance'` with another strategy",
        ),
        (config.split_batches, f"under `split_batches` {_OWN_BATCHES}", "Leave `split_batches` out"),
        (config.dispatch_batches, f"under `dispatch_batches` {_OWN_BATCHES}", "Leave `dispatch_batches` out"),
        (
            args.world_size > 1 and not config.even_batches,
            "without `even_batches` ranks have different numbers of batches",
            "Leave `even_batches` out",
        ),
        (
            args.world_size > 1 and not args.average_tokens_across_devices,
            "without `average_tokens_across_devices` each rank would weigh its tokens by itself",
            "Leave `average_tokens_across_devices` out",
        ),
        (
            mesh_size > 1,
            f"{mesh_size} ranks of a mesh of `parallelism_config` share their samples",
            "Give the sizes of each module in `parallel`",
        ),
    )
    for is_refused, reason, remedy in refused:
        if is_refused:
            raise _refusal(args, reason, remedy)


def _refusal(args: Any, reason: str, remedy: str) -> ValueError:
    name = arrangement_name(args.microbatch_assignment)
    return ValueError(f"`microbatch_assignment={name!r}` can't be used here without `parallel`: {reason}. {remedy}.")


def encoders_run_together(trainer: Any, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the encoders whose weights or gradients all ranks exchange while they run them."""
    # DDP finds out by itself which parameters took part
    if trainer.args.world_size == 1 or not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        return ()
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if trainer.is_fsdp_enabled or getattr(plugin, "zero_stage", 0) == 3:
        return tuple(spec.encoders)  # weights are sharded
    # gradients are sharded
    return tuple(name for name in spec.encoders if any(p.trainable for p in spec.modules[name].parameters))


def make_rank_loader(
    loader: Any,
    context: RunContext,
    sizes: TrainingSizes,
    costs: CostModel,
    # samples of a batch of one rank
    batch_size: int,
    # see [`encoders_run_together`]
    together: tuple[str, ...],
    # `Accelerator.prepare`, which keeps the loader
    prepare: Callable[[Any], Any],
) -> Any:
    """
    Returns a loader of the stock Trainer's global batches, arranged over ranks and accumulation steps. Collective;
    raises `ValueError` for a dataset without indices, and if nothing says the sizes of its samples.
    """
    args, world = context.args, context.world
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    if not isinstance(loader, DataLoaderShard) or not isinstance(batches, BatchSampler):
        raise _refusal(args, f"a `{type(loader).__name__}` of other batches comes from the dataset", "Leave it out")
    size = batch_size * world.size
    order = EvenOrder(batches.sampler, size, args.dataloader_drop_last, fills=world.size > 1)
    global_batches = GlobalBatchSampler(order, size * args.gradient_accumulation_steps)
    shared = sizes.common_sizes(context.train_dataset, global_batches.global_batch_size)
    arrangement = args.microbatch_assignment
    assert arrangement is not None
    if shared.source is None and arrangement != "contiguous":
        raise _refusal(
            args,
            "nothing says the sizes of the samples",
            "Give `token_columns`, or `sample_tokens` to the Trainer",
        )
    if shared.is_measured_by_batch:
        global_batches = with_sizes(global_batches, context.train_dataset, shared, context)
    planner = RankPlanner(costs, world.size, batch_size, arrangement, shared.source, together)
    sampler: Any = RankBatchSampler(global_batches, planner, world.rank, batch_size, world.size)
    arranged = DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
    )
    # One process: the sampler has the batches of this rank already.
    prepared: Any = prepare_data_loader(
        arranged,
        loader.device,
        num_processes=1,
        process_index=0,
        put_on_device=loader.device is not None,
        non_blocking=loader._non_blocking,
    )
    prepared._is_accelerate_prepared = True
    return prepare(prepared)
