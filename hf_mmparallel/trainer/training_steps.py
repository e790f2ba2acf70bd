"""The training steps of a run under a plan: the ranks agree on a global batch; it is read, run and checked."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import has_length

from .._device import HostCopy
from .._files import check_complete, readable
from ..data.bad_samples import BadSample, BadSampleError
from ..data.global_batches import DataPosition, GlobalBatch
from ..data.step_batch import StepBatch, UnreadableBatch
from ..data.step_dataset import StepDataset
from ..plan.methods import ARRANGEMENT_CANDIDATES
from ..runtime.engine import ParallelEngine
from ..runtime.step_check import StepTotals
from ..world import ACTIVITY, World, raise_on_all_ranks
from .arguments import MultimodalTrainingArguments
from .loaders import TrainingLoader
from .start_checks import check_output_dir
from .training_sizes import LimitWatch, Mark, MemoryRatio

logger = get_logger(__name__)

# Agreement of the ranks on samples: the same ones everywhere, without those that some rank can't read.

_NUM_COMPARED = 8
_UNREAD_CHECKSUM = -1


def check_same_folder(folder: str, setting: str, world: World) -> None:
    """Raises `ValueError` on all ranks, with two folders, if some rank saves to another one. Collective."""
    # each rank writes its part of a checkpoint there; `setting` names the argument in the error
    folders = world.all_gather(folder, "comparing the folder to save to")
    other = next((rank for rank, path in enumerate(folders) if path != folders[0]), None)
    if other is not None:
        raise ValueError(
            f"`{setting}` is `{folders[0]}` on rank 0 and `{folders[other]}` on rank {other}. Each rank writes its "
            "part of a checkpoint there: give all the same folder, without the rank, or a time that each process "
            "reads by itself, in its name."
        )


def check_output_folder(args: TrainingArguments, world: World) -> None:
    """Raises `ValueError` on all ranks if they save to different folders, or can't write to theirs. Collective."""
    if args.save_strategy != "no":
        check_same_folder(str(args.output_dir), "output_dir", world)
    world.from_first_rank(functools.partial(check_output_dir, args))


class SampleAgreement:
    """Leaves out samples that some rank can't read, or raises, the same on every rank."""

    def __init__(self, skip: bool, world: World, name: str = "dataset"):
        self.skip = skip  # otherwise such samples end the run
        self.world = world
        self.name = name  # of the dataset in errors
        self.num_skipped = 0
        self._reported: set[str] = set()
        self._compared: StepDataset | None = None

    def compare_again(self) -> None:
        """Lets the ranks compare samples again: of other samples, or of ranks, some may have compared and some not."""
        self._compared = None

    def agree(self, item: StepBatch | UnreadableBatch | None, dataset: StepDataset) -> StepBatch | None:
        """
        Returns the step of a loader's item, `None` at its end, without bad samples, the same on every rank. Raises
        [`BadSampleError`] for a bad sample unless `skip`, and when no sample of the step can be read; `RuntimeError`
        for streams and datasets that differ.

        Collective if `skip`: the ranks combine their bitmaps of bad samples, and while there are any the step is
        planned and read again without them. Collective for streams, whose rows the ranks compare, and for the first
        batch of any other dataset, of which they compare some samples.
        """
        if dataset.window is not None:
            self._compare(item)
        elif dataset is not self._compared:
            self._compare_first(None if item is None else item.global_batch, dataset)
            self._compared = dataset
        if item is None:
            return None
        if not self.skip and isinstance(item, UnreadableBatch):
            raise next(iter(item.bad.values())).error(self.world.rank if self.world.size > 1 else None)
        while self.skip and (batch_indices := self._bad_batch_indices(item)):
            reasons = self._exchange(item)
            if len(batch_indices) == len(item.global_batch.samples):
                raise BadSampleError(
                    f"None of the {len(batch_indices)} samples of a global batch can be read, the first because of: "
                    f"{reasons[batch_indices[0]][1]} Check the files and the collator."
                )
            for batch_index in batch_indices:
                self._report(*reasons[batch_index])
            self.num_skipped += len(batch_indices)
            item = dataset.again(item, batch_indices)
        assert isinstance(item, StepBatch)
        return item

    def batches(self, loader: Any) -> Iterator[StepBatch]:
        """The steps of a loader, without samples that can't be read. Collective, see [`~SampleAgreement.agree`]."""
        items = iter(loader)
        while (batch := self.agree(next(items, None), loader.dataset)) is not None:
            yield batch

    def _bad_batch_indices(self, item: StepBatch | UnreadableBatch) -> list[int]:
        flags = torch.zeros(len(item.global_batch.samples), dtype=torch.uint8)
        flags[list(item.bad)] = 1
        self.world.all_reduce(flags, "max", "comparing which samples can be read")
        return flags.nonzero().flatten().tolist()

    def _compare(self, item: StepBatch | UnreadableBatch | None) -> None:
        """Raises `RuntimeError` if the ranks don't read the same samples of a stream."""
        count = 0 if item is None else len(item.global_batch.samples)
        digest = 0 if item is None or item.stream is None else item.stream.digest
        extremes = torch.tensor([count, -count, digest, -digest])
        self.world.all_reduce(extremes, "max", "comparing samples of the stream")
        max_count, min_count, max_digest, min_digest = extremes.abs().tolist()
        if max_count != min_count or max_digest != min_digest:
            raise RuntimeError(
                f"The ranks read different samples from the stream, {min_count} to {max_count} for this step "
                f"(checksums from {min_digest} to {max_digest}). Every rank reads all of it: seed its shuffling, and "
                "don't split it by rank."
            )

    def _compare_first(self, global_batch: GlobalBatch | None, dataset: StepDataset) -> None:
        """Raises `RuntimeError` if the first samples of a global batch have another content on another rank."""
        samples = () if global_batch is None else global_batch.samples
        digests = [_UNREAD_CHECKSUM] * (1 + _NUM_COMPARED)
        digests[0] = zlib.crc32(repr(samples).encode())
        for number, digest in enumerate(
            dataset.digests(global_batch, _NUM_COMPARED) if global_batch is not None else ()
        ):
            digests[1 + number] = _UNREAD_CHECKSUM if digest is None else digest
        drawn, *columns = zip(*self.world.all_gather(digests, "comparing the first samples"), strict=True)
        if len(set(drawn)) > 1:
            return  # the ranks drew different indices: the check of the step reports it
        for number, column in enumerate(columns):
            known = {rank: digest for rank, digest in enumerate(column) if digest != _UNREAD_CHECKSUM}
            first = next(iter(known), 0)
            other = next((rank for rank, digest in known.items() if digest != known[first]), None)
            if other is not None:
                raise RuntimeError(
                    f"Sample {samples[number]} of the {self.name} differs between rank {first} and rank {other}. "
                    "Under a plan several ranks work on one sample, so that all need the same dataset in the same "
                    "order. `train_test_split`, `shuffle` and `random_split` without a seed draw in each process "
                    "anew: give them one (`seed=0`, or a `generator` with a seed), or build the dataset once and load "
                    "it on all ranks."
                )

    def _exchange(self, item: StepBatch | UnreadableBatch) -> dict[int, tuple[int, BadSample]]:
        """Batch index -> the first rank that could not read its sample, and the reason."""
        every = self.world.all_gather(item.bad, "comparing which samples can be read")
        ranks = reversed(list(enumerate(every)))
        return {batch_index: (rank, bad) for rank, samples in ranks for batch_index, bad in samples.items()}

    def _report(self, rank: int, bad: BadSample) -> None:
        """Logs a sample that a rank met once, on rank 0."""
        sentence = str(bad)
        if sentence not in self._reported:
            self._reported.add(sentence)
            logger.warning(f"{sentence} Rank {rank} met it. It is left out.")


class TargetCount:
    """Warns of global batches without target tokens, whose loss is always 0."""

    def __init__(self):
        self.num_without = 0

    def saw(self, num_targets: int, is_first: bool) -> None:
        """Counts targets of a global batch, over all ranks; the first one of a run has to have some."""
        if num_targets:
            return
        reason = (
            "all `labels` are -100. Targets are what the `assistant` says in conversations, and what has a label of "
            "its own otherwise"
        )
        # not the first of one that is resumed
        if is_first:
            raise ValueError(
                f"The first global batch has no target token: {reason}. Give the roles of messages these names, or "
                "filter samples without targets."
            )
        self.num_without += 1
        # a later batch without any is logged the first time
        if self.num_without == 1:
            logger.warning(
                f"A global batch has no target token: {reason}. Its loss is 0, where the stock Trainer's is NaN; "
                "nothing is learned from it. Further ones are not reported."
            )


# The state of a Trainer in a checkpoint, and its position in the data, counted in samples.


def check_trainer_state(folder: Path) -> None:
    """Raises `ValueError` if the stock Trainer could not read its state in a checkpoint."""
    check_complete(folder, TRAINER_STATE_NAME)
    with readable(folder / TRAINER_STATE_NAME):
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))


def save_trainer_state(folder: Path, state: TrainerState, stateful: Iterable[Any]) -> None:
    """Writes the state of a Trainer, with those of the callbacks and the control that have one (`stateful`)."""
    for part in stateful:
        if isinstance(part, ExportableState):
            name = type(part).__name__
            states: Any = state.stateful_callbacks
            if isinstance(states[name], list):
                states[name].append(part.state())
            else:
                states[name] = part.state()
    state.save_to_json(str(folder / TRAINER_STATE_NAME))


class DataProgress:
    """The position of a training run in its data, of the checkpoint that it goes on from or the start."""

    def __init__(self, global_batch_size: int, folder: str | None = None):
        self.global_batch_size = global_batch_size
        saved = None if folder is None else DataPosition.load(folder)
        self.position = saved or DataPosition()
        self.resumed_at: tuple[int, int] | None = None

    def step(self, global_batch: GlobalBatch) -> None:
        """Advances by the samples of a step."""
        self.position = self.position.after(global_batch, self.global_batch_size)

    def training_values(self, values: tuple, args: Any, dataloader: DataLoader) -> tuple:
        """
        Returns the `values` of `Trainer.set_initial_training_values` for a resumed run, maybe with another batch size:
        the number of steps follows from the samples that are left. The loader's global batches get the position.
        """
        position = self.position
        if args.ignore_data_skip:
            self.position = DataPosition(num_skipped=position.num_skipped)
        if not position.global_step or args.ignore_data_skip:
            return values
        epochs, steps_per_epoch, *others, max_steps = values
        global_batches: Any = dataloader.batch_sampler
        num_samples = len(global_batches.sampler) if has_length(dataloader) else None
        epoch, done = self.resumed_at = position.resume(global_batches, num_samples)
        if num_samples is not None and args.max_steps > 0:
            epochs = epoch + math.ceil((max_steps - position.global_step + done) / steps_per_epoch)
        elif num_samples is not None:
            max_steps += position.global_step - epoch * steps_per_epoch - done
        return epochs, steps_per_epoch, *others, max_steps


class FiniteCheck:
    """Warns of the first, the tenth and the hundredth step whose loss or norm of the gradient is not finite."""

    def __init__(self, filtered: bool):
        # whether such losses are left out of the log (`logging_nan_inf_filter`); training goes on, as in the stock
        # Trainer
        self.filtered = filtered
        self.num_steps = 0
        self._last_step = -1
        self._watched: deque[tuple[int, str, HostCopy]] = deque()

    def logged(self, loss: torch.Tensor, trainer: Any) -> torch.Tensor:
        """The loss that a step adds to the log: the mean of the others for one that is left out."""
        if not self.filtered:
            return loss
        mean = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean)

    def watch(self, step: int, name: str, value: torch.Tensor) -> None:
        """Looks at the loss (`"loss"`) or norm (`"norm"`) of a step as soon as the device has computed it."""
        self._watched.append((step, name, HostCopy(value)))
        self.check(waits=False)

    def check(self, waits: bool = True) -> None:
        """Checks all values, or with `waits=False` those that have come."""
        while self._watched and (waits or self._watched[0][2].is_here()):
            step, name, value = self._watched.popleft()
            found = value.read()
            if math.isfinite(found):
                continue
            if name == "norm":
                self._found(step, f"The norm of the gradient of step {step} is {found}.")
            else:
                shown = " The log leaves it out (`logging_nan_inf_filter`)." if self.filtered else ""
                self._found(step, f"The loss of step {step} is {found}.{shown}")

    def _found(self, step: int, sentence: str) -> None:
        """Counts a step once, and warns of few."""
        if step == self._last_step:
            return
        self._last_step = step
        self.num_steps += 1
        if math.log10(self.num_steps).is_integer():
            count = "" if self.num_steps == 1 else f" It is the {self.num_steps}th such step."
            logger.warning(
                f"{sentence}{count} Usually the learning rate is too high, samples hold values that are not finite, "
                "or a low precision overflows. Training goes on, but an update that is not finite spoils the weights: "
                f"resume from a checkpoint before step {step} with a lower `learning_rate` or `max_grad_norm`."
            )


class ModuleLosses:
    """The losses of single modules, of a model with generators, whose weighted sum is the loss of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._last_step = 0  # the last one that was logged

    def add(self, losses: Mapping[str, torch.Tensor]) -> None:
        for name, loss in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + loss.detach()

    def take(self, step: int) -> dict[str, float]:
        """The means over the steps since the last call, as they are logged."""
        num_steps, self._last_step = max(step - self._last_step, 1), step
        means = {f"loss/{name}": float(total) / num_steps for name, total in self._sums.items()}
        self._sums.clear()
        return means


def count_generator_targets(batches: Sequence[dict[str, Any]], model: Any, accelerator: Any) -> None:
    """Tells a model with generators how many targets these have in all batches whose losses are added."""
    generators: Any = getattr(accelerator.unwrap_model(model), "generators", None)
    if generators and batches:
        own = [sum(part.num_targets(batch) for batch in batches) for part in generators.values()]
        counts = accelerator.gather(torch.tensor([own], device=accelerator.device)).sum(0)
        for batch in batches:
            batch["num_generator_targets"] = dict(zip(generators, counts.tolist(), strict=True))


class TrainingSteps:
    """Reads and runs the steps of a training, and warns of what goes wrong in them."""

    def __init__(self, engine: ParallelEngine, args: MultimodalTrainingArguments, global_batch_size: int):
        self.engine = engine
        self.global_batch_size = global_batch_size
        # leaves out those that can't be read
        self.samples = SampleAgreement(args.on_bad_sample == "skip", engine.world, "training dataset")
        self.finite = FiniteCheck(args.logging_nan_inf_filter)
        self.memory_ratio: MemoryRatio | None = None  # with `memory_limit_gib="auto"`; of the loader in use
        self.progress = DataProgress(global_batch_size)
        self.totals = StepTotals(torch.zeros(()), 0, 0, 0)  # of the last step over all ranks
        self._targets = TargetCount()
        self.limits = LimitWatch()
        self.training: TrainingLoader | None = None  # the loader in use
        self._items: Iterator[StepBatch | UnreadableBatch] | None = None  # of the epoch
        self._given: Any = None  # the iterator that `_items` is, or has replaced
        self._batch: StepBatch | None = None  # the last one, unless the plan has changed since
        self._done = self.progress.position  # after the last step that counts
        self._num_skipped_done = 0

    def begin(self, checkpoint: str | None) -> None:
        """Sets the position in the data to that of a checkpoint, or to the start. Collective."""
        self.progress = self.engine.world.raise_together(lambda: DataProgress(self.global_batch_size, checkpoint))
        self.samples.num_skipped = self.progress.position.num_skipped
        self.step_counts()

    def use(self, training: TrainingLoader) -> None:
        """Lets the steps that follow be those of a loader, for callbacks, errors and the memory ratio."""
        self.engine.planner = training.run_planner
        self.memory_ratio = training.memory_ratio
        self.training = training

    def check_reads(self, loader: Any) -> None:
        """Raises `ValueError` for a loader that [`TrainingSteps.follow_plan`] could not read from a position."""
        if self.training is None or loader is not self.training.loader:
            raise ValueError(
                f"`get_train_dataloader` returned a `{type(loader).__name__}` of its own, which can't be read again "
                "from a position when ranks are lost, as `resilience` has to. Return the inherited method's loader; "
                "another order comes from `_get_train_sampler`."
            )

    @property
    def learned_ratio(self) -> Mark | None:
        """The memory ratio that the checkpoint has."""
        learned = self.progress.position.memory_ratio
        return None if learned is None else (learned[0], learned[1], learned[2])

    def step_counts(self) -> None:
        """Notes that the step that was read last counts: the run does not go back behind it."""
        self._done, self._num_skipped_done = self.progress.position, self.samples.num_skipped

    def follow_plan(self) -> None:
        """Plans steps by the plan that the engine has now, from the one after the last that counts."""
        assert self.training is not None
        self.training = self.training.with_plan(self.engine)
        self.engine.planner = self.training.run_planner
        if hasattr(self._items, "_shutdown_workers"):
            self._items._shutdown_workers()  # type: ignore[union-attr]
        self._go_on()
        self.samples.compare_again()

    def _go_on(self) -> None:
        assert self.training is not None
        self.progress.position, self.samples.num_skipped = self._done, self._num_skipped_done
        self._items = self.training.items_after(self._done)
        self._batch = None

    def begin_epoch(self, number: int) -> None:
        """Reads the steps of an epoch of the loader in use, those after the last step that counts. Collective."""
        assert self.training is not None
        global_batches: Any = self.training.loader.batch_sampler
        with raise_on_all_ranks("reading samples"):
            global_batches.set_epoch(number)
            self._go_on()

    def end_epoch(self, number: int) -> None:
        self.progress.position = dataclasses.replace(self.progress.position, epoch=number + 1, num_samples=0)
        self.step_counts()

    def enter_epoch(self, items: Iterator[StepBatch | UnreadableBatch]) -> None:
        """Reads from the items of an epoch of the training loader from now on, which a change of the plan replaces."""
        if items is not self._given:
            self._given = self._items = items

    def read(self, dataset: StepDataset, step: int) -> StepBatch | None:
        """Reads the next global batch without unreadable samples; `None` at the end of an epoch. Collective."""
        ACTIVITY.step = step
        engine = self.engine
        assert self._items is not None
        with raise_on_all_ranks("reading samples"):
            with engine.waiting_for_data():
                item = next(self._items, None)
            batch = self._batch = self.samples.agree(item, dataset)
        if batch is None:
            return None
        self.progress.step(batch.global_batch)
        if engine.planner is not None and engine.planner.arrangement in ARRANGEMENT_CANDIDATES:
            self.limits.saw(batch.step, batch.workloads)
        return batch

    def run(self, index: int) -> StepTotals:
        """Computes the gradients of the global batch that was read last, after `index` steps. Collective."""
        batch = self._batch
        if batch is None:  # the plan has changed since
            assert self.training is not None
            batch = self.read(self.training.dataset, index + 1)
            assert batch is not None
        self.totals = self.engine.train_step(batch, index)
        self._targets.saw(self.totals.num_targets, is_first=not index)
        if self.memory_ratio is not None:
            self.memory_ratio.saw_step(self.engine)
        self.finite.watch(index + 1, "loss", self.totals.mean_loss)
        return self.totals

    def num_tokens(self, counted: str) -> int:
        """Input tokens of the last step, as `include_num_input_tokens_seen` counts them."""
        if counted == "no":
            return 0
        return self.totals.num_real_tokens if counted == "non_padding" else self.totals.num_tokens

    def save(self, folder: Any, global_step: int) -> None:
        """Writes the position in the data after the last step that counts into a checkpoint."""
        learned = None if self.memory_ratio is None else self.memory_ratio.learned
        assert self.training is not None
        global_batches: Any = self.training.loader.batch_sampler
        position = dataclasses.replace(
            self._done,
            global_step=global_step,
            num_skipped=self._num_skipped_done,
            memory_ratio=self._done.memory_ratio if learned is None else list(learned),
            generator_state=global_batches.generator_state(self._done.epoch),
        )
        position.save(folder)
