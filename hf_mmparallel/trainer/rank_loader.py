"""The training loader of a run without a plan whose samples are arranged over ranks and accumulation steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader

from ..arrange.rank_batches import RANK_ARRANGEMENTS
from ..cost import CostModel
from ..cost.step_planner import RankPlanner
from ..data.global_batches import EvenOrder, GlobalBatchSampler, RankBatchSampler
from ..data.streams import is_stream
from ..plan import ModelSpec
from ..plan.methods import arrangement_name
from .loaders import with_sizes
from .training_sizes import RunContext, TrainingSizes

_OWN_BATCHES = "ranks would not get the batches that samples are arranged in"


def check_arrangement(trainer: Any) -> None:
    """
    Raises `ValueError`, on every rank, for what `microbatch_assignment` can't be used with in a run without a plan.
    """
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
