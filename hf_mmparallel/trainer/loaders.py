"""The Trainer's data loaders under a plan: every item is a step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker
from transformers.utils.import_utils import is_datasets_available

from ..data.drawn_sizes import SizedDraws
from ..data.draws import DrawSampler, LengthGroups
from ..data.loader import StepDataset, as_is, keys_of_rank
from ..data.media import readers
from ..data.streams import StreamSampler, StreamWindow, is_stream
from ..plan import LANGUAGE_MODEL, SampleSizes
from ..steps.method_choice import DEFAULT_METHOD
from ..steps.step_planner import SizeFunction, StepPlanner
from ..world import World
from .arguments import AUTO
from .memory_ratio import MemoryRatio, allocated_since
from .oversized_samples import allowed_bytes
from .start_checks import check_dataset

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer
    from .training_sizes import SharedSizes


def train_loader(trainer: MultimodalParallelTrainer) -> DataLoader:
    """Global batches of the training set in the stock Trainer's order, arranged as the arguments say."""
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None:
        raise ValueError("Trainer: training requires a train_dataset.")
    check_dataset(dataset)
    dataset = _windowed(trainer, dataset, args.dataloader_drop_last)
    if isinstance(dataset, StreamWindow):
        sampler = StreamSampler(dataset)
    else:
        sampler = trainer._get_train_sampler(dataset)
        if isinstance(sampler, LengthGroupedSampler):
            seed = args.seed if args.data_seed is None else args.data_seed
            sampler = LengthGroups(sampler, trainer.global_batch_size, seed)
        sampler = _seeded(trainer, sampler)
    draws = DrawSampler(sampler, trainer.global_batch_size, args.dataloader_drop_last)
    method = trainer.world.from_first_rank(lambda: trainer.method_choice.method)
    sizes = trainer.training_sizes.shared(dataset)
    planner = trainer._engine.planner = training_planner(trainer, sizes.source, sizes.typical, method)
    trainer.memory_ratio = _memory_ratio(trainer, planner, sizes)
    if sizes.is_measured_when_drawn:
        draws, planner = _sized(trainer, dataset, draws, sizes), replace(planner, sizes=None)
    if trainer.memory_ratio is not None:
        draws.limits_of = trainer.memory_ratio.limits_of
    return _step_loader(trainer, dataset, draws, planner, "Training")


def _memory_ratio(trainer: MultimodalParallelTrainer, planner: StepPlanner, sizes: SharedSizes) -> MemoryRatio | None:
    """What learns the memory of steps, if that is asked for and limits depend on it."""
    if trainer.args.memory_limit_gib != AUTO or planner.memory_bytes is None or sizes.typical is None:
        return None
    measure = functools.partial(allocated_since, trainer._engine.device)
    return MemoryRatio(planner, sizes.typical, measure, trainer.learned_ratio)


def _sized(trainer: MultimodalParallelTrainer, dataset: Any, draws: DrawSampler, sizes: SharedSizes) -> SizedDraws:
    """The draws with sizes, of which each rank measures a part."""
    args, engine = trainer.args, trainer._engine
    unknown = sizes.median or SampleSizes.uniform(dict.fromkeys(engine.plan.modules, 1), 1)
    return SizedDraws(
        draws,
        sizes.source,
        dataset,
        unknown,
        functools.partial(trainer.world.all_gather, what="exchanging the sizes of samples"),
        engine.rank,
        engine.plan.world_size,
        args.dataloader_num_workers,
        args.dataloader_multiprocessing_context,
        keeps=args.local_process_index == 0,
    )


def eval_loader(trainer: MultimodalParallelTrainer, dataset: Any, description: str) -> DataLoader:
    """Batches of a dataset in its order, with enough microbatches to fill the pipeline."""
    check_dataset(dataset)
    plan = trainer._engine.plan
    depth = max(len(stages) for module in plan.modules.values() for stages in module.replicas)
    size = trainer.args.per_device_eval_batch_size
    count = size * plan.modules[LANGUAGE_MODEL].dp_size * max(2 * depth, plan.num_microbatches)
    dataset = _windowed(trainer, dataset, drop_last=False)
    if isinstance(dataset, StreamWindow):
        order: Any = StreamSampler(dataset)
    else:
        order = _seeded(trainer, trainer._get_eval_sampler(dataset) or SequentialSampler(dataset))
    draws = DrawSampler(order, count)
    return _step_loader(trainer, dataset, draws, _planner(trainer, size, training=False), description)


def check_loader(loader: Any, method: str) -> None:
    """
    Raises `ValueError` for a loader that is not this package's.

    Args:
        loader (`Any`): What the method returned.
        method (`str`): The method of the Trainer that it comes from, maybe an override.
    """
    if not isinstance(getattr(loader, "dataset", None), StepDataset):
        raise ValueError(
            f"`{method}` returned a `{type(loader).__name__}` of batches, but under a plan steps are arranged over "
            "the ranks by a loader of its own. Return what the inherited method returns; another order, other "
            "batches and other samples come from `_get_train_sampler`, a `data_collator` and a dataset."
        )


def training_planner(
    trainer: MultimodalParallelTrainer,
    sizes: SizeFunction | None,
    typical: SampleSizes | None = None,
    method: str | None = None,
) -> StepPlanner:
    """
    Plans the training steps, by the sizes of samples and with limits of microbatches for a typical batch, with the
    arrangement `method` if the user names none.
    """
    args = trainer.args
    planner = _planner(
        trainer,
        args.per_device_train_batch_size,
        method=args.microbatch_assignment or method or DEFAULT_METHOD,
        sizes=sizes,
        max_tokens=args.max_tokens_per_microbatch,
        memory_bytes=allowed_bytes(args, trainer._engine.costs.device),
    )
    return planner if typical is None else planner.with_limits(typical)


def _planner(trainer: MultimodalParallelTrainer, microbatch_size: int, **settings: Any) -> StepPlanner:
    engine = trainer._engine
    return StepPlanner(engine.costs, engine.plan, engine.sync_groups, microbatch_size, **settings)


def _windowed(trainer: MultimodalParallelTrainer, dataset: Any, drop_last: bool) -> Any:
    """The dataset, through a window if it is a stream."""
    if not is_stream(dataset):
        return dataset
    args = trainer.args
    carries_rows = args.on_bad_sample == "skip" and args.dataloader_num_workers > 0
    return StreamWindow(dataset, args.seed, drop_last, carries_rows)


def _seeded(trainer: MultimodalParallelTrainer, sampler: Any) -> Any:
    """The stock Trainer's order on one process: the sampler that accelerate makes of it."""
    args = trainer.args
    seed = args.data_seed if args.data_seed is not None else args.seed
    if not isinstance(sampler, RandomSampler):
        return sampler
    if not args.accelerator_config.use_seedable_sampler:
        return _OwnOrder(sampler, trainer.world)
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator(),
        data_seed=seed,
    )


class _OwnOrder:
    """A random order by torch's global generator, as the stock Trainer draws it, and that of rank 0 on all ranks."""

    def __init__(self, sampler: RandomSampler, world: World):
        self.sampler = sampler
        self.world = world

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.world.from_first_rank(lambda: list(self.sampler)))


def _step_loader(
    trainer: MultimodalParallelTrainer, dataset: Any, draws: DrawSampler, planner: StepPlanner, description: str
) -> DataLoader:
    """A loader that yields a [`StepBatch`] for each global batch."""
    engine, args = trainer._engine, trainer.args
    workers = args.dataloader_num_workers
    dataset, collator = without_unused_columns(trainer, dataset, description)
    modules = readers(dataset, collator, engine.spec, engine.encoder_inputs)
    keys = functools.partial(keys_of_rank, engine.plan, rank=engine.rank)  # a worker needs no engine
    window = dataset if isinstance(dataset, StreamWindow) else None
    steps = StepDataset(modules, keys, args.seed, engine.unused_inputs, engine.cutter, planner, engine.rank, window)
    order: Any = draws
    return DataLoader(
        steps,
        batch_sampler=order,
        collate_fn=as_is,
        num_workers=workers,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=functools.partial(seed_worker, num_workers=workers, rank=args.process_index),
    )


def without_unused_columns(trainer: MultimodalParallelTrainer, dataset: Any, description: str) -> tuple[Any, Any]:
    """A dataset and its collator, one of which leaves out what the model does not take."""
    if is_datasets_available() and hasattr(dataset, "column_names"):
        return trainer._remove_unused_columns(dataset, description=description), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)
