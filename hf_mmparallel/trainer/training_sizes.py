"""Sizes of the training samples before and during a run, and those that are larger than a microbatch may be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from transformers.utils.logging import tqdm

from ..cost import Hardware, usable_bytes
from ..cost.step_planner import SizeFunction, StepPlanner
from ..data.global_batches import GlobalBatch
from ..data.image_rules import column_rules
from ..data.layer_tokens import measure_layers
from ..data.measured_batches import median_of
from ..data.randomness import seeded
from ..data.sample_sizes import SizeSource, size_source
from ..data.size_sources import LayerTokens, StreamSizes, draw_samples, evenly_spaced, measurable
from ..data.streams import StreamWindow
from ..plan import LANGUAGE_MODEL, ModelSpec, PlannedFor, SampleSizes, StepPlan, Workloads
from ..runtime.engine import ParallelEngine
from ..world import World, raise_on_all_ranks
from .arguments import AUTO, MultimodalTrainingArguments

logger = get_logger(__name__)

# The parts of a run that code below the Trainer needs.


@dataclass(frozen=True)
class RunContext:
    """Arguments, model and training samples of a run under a plan, as the Trainer has them at one moment."""

    args: MultimodalTrainingArguments
    world: World
    model: Any  # the whole one, or this rank's part of it once there is an engine
    spec: ModelSpec  # of the whole model
    train_dataset: Any
    collator: Any  # makes a batch of samples
    processing_class: Any  # tokenizer or processor
    sample_tokens: Callable | None  # sample -> module -> its tokens, see [`MultimodalParallelTrainer`]
    # dataset and its name in messages -> both it and its collator without the columns that the model does not read
    drop_columns: Callable[[Any, str], tuple[Any, Any]]


_NUM_MEASURED = 256  # samples, where not all sizes are known before they are drawn
_NUM_STREAMED = 64  # samples of a stream
_SAMPLES_PER_UPDATE = 64  # samples between two updates of the progress bar


@dataclass(frozen=True)
class StartSizes:
    """Sizes of training samples that are known before the first step."""

    sizes: SampleSizes  # of all samples, or of some from all over the dataset
    are_all: bool

    def draw(self, request: PlannedFor) -> SampleSizes:
        """Those that batches of predictions are drawn from, of all samples the ones that the planner measures."""
        if not self.are_all:
            return self.sizes
        return self.sizes.take(draw_samples(self.sizes.num_samples, request.num_samples, request.seed))


@dataclass(frozen=True)
class CommonSizes:
    # dataset indices -> sizes, or how each rank measures them; `None` where sizes are unknown
    source: SizeSource | None
    typical: SampleSizes | None  # of a global batch whose samples are like the mean one
    median: SampleSizes | None  # of one sample, used for samples of unknown size

    @property
    def is_measured_by_batch(self) -> bool:
        """Whether each rank measures a part of each global batch."""
        return self.source is not None and not self.source.is_table and not isinstance(self.source, StreamSizes)


class TrainingSizes:
    """Sizes of the training samples, measured once; results are added to `measured`."""

    def __init__(
        self,
        context: RunContext,
        measured: dict[str, tuple[Any, Any]] | None = None,  # name -> the dataset or source that it is of, result
    ):
        self.context = context
        self.measured = {} if measured is None else measured

    def _once(self, name: str, of: Any, measure: Callable[[], Any]) -> Any:
        """What `measure` returns for a dataset or source, once."""
        if name not in self.measured or self.measured[name][0] is not of:
            self.measured[name] = of, measure()
        return self.measured[name][1]

    def of_rank(self, dataset: Any) -> SizeSource | None:
        """Returns dataset indices -> sizes, as this rank alone measures them; `None` where sizes are unknown."""
        source = self._in_features(dataset)
        if source is None:
            return None
        return self._once("with_layers", source, lambda: source.with_layers(self._layers(dataset, source)))

    def at_start(self, dataset: Any, global_batch_size: int) -> StartSizes | None:
        """Returns sizes that this rank alone measures before the first step; `None` where they are unknown."""
        return self._once("start", dataset, lambda: self._at_start(dataset, global_batch_size))

    def _at_start(self, dataset: Any, global_batch_size: int) -> StartSizes | None:
        with seeded(self.context.args.seed):  # only this rank reads samples here
            source = self.of_rank(dataset)
            if source is None:
                return None
            readable: Sequence[int] = range(len(source)) if source.is_table else ()
            if not source.is_table:
                count = _NUM_MEASURED
                if isinstance(source, StreamSizes):
                    dataset, count = copy.copy(source.window), _NUM_STREAMED  # training reads the stream itself
                    source = source.of_window(dataset)
                global_batch = representative_batch(dataset, source, max(count, global_batch_size), self.context.args)
                readable = measurable(source, global_batch.samples, skip=True)
            sizes = source(readable) if readable else None
        return None if sizes is None or not sizes.known else StartSizes(sizes, source.is_table)

    def typical(self, dataset: Any, global_batch_size: int) -> SampleSizes | None:
        """Sizes of a global batch whose samples are like the mean one, as [`~TrainingSizes.at_start`] finds them."""
        start = self.at_start(dataset, global_batch_size)
        return None if start is None else start.sizes.like_the_mean(global_batch_size)

    def common_sizes(self, dataset: Any, global_batch_size: int) -> CommonSizes:
        """Returns sizes that are equal on all ranks. Collective."""

        def find() -> tuple[CommonSizes, dict[str, LayerTokens] | None]:
            source, start = self.of_rank(dataset), self.at_start(dataset, global_batch_size)
            typical = self.typical(dataset, global_batch_size)
            median = None if start is None else median_of(start.sizes, LANGUAGE_MODEL)
            local = source is not None and not source.is_table
            layers = self.measured["layers"][1] if local else None
            return CommonSizes(None if local else source, typical, median), layers

        # The first rank measures the encoders, and all samples that are measured in advance, because a file may be
        # readable on one host and not on another.
        with raise_on_all_ranks("measuring samples"):
            shared, layers = self.context.world.from_first_rank(find)
            source = None if layers is None else self._in_features(dataset)
        return shared if source is None or layers is None else replace(shared, source=source.with_layers(layers))

    def _in_features(self, dataset: Any) -> SizeSource | None:
        """Sizes in which an encoder has as many tokens as features."""
        context = self.context
        words = (context.collator, context.spec, context.args.token_columns, context.sample_tokens)
        processor, workers = context.processing_class, context.args.dataloader_num_workers or None

        def find() -> SizeSource | None:
            rules = column_rules(context.args.token_columns, context.model, context.spec, processor)
            return size_source(dataset, *words, processor, num_proc=workers, rules=rules)

        return self._once("source", dataset, find)

    def _layers(self, dataset: Any, source: SizeSource) -> dict[str, LayerTokens]:
        """Encoder -> tokens in its layers for a number of features."""

        def measure() -> dict[str, LayerTokens]:
            context = self.context
            lean, collator = context.drop_columns(dataset, "Training")
            with seeded(context.args.seed):  # only this rank reads samples here
                return measure_layers(context.model, context.spec, lean, collator, source)

        return self._once("layers", None, measure)  # the same for all datasets


def representative_batch(
    dataset: Any, sizes: SizeFunction | None, count: int, args: MultimodalTrainingArguments
) -> GlobalBatch:
    """Returns samples from all over a dataset, the first ones without `sizes`, or the first of a stream."""
    first = GlobalBatch(tuple(range(count)))
    if isinstance(dataset, StreamWindow):
        return dataset.fetch(first)
    if sizes is None:
        return first
    chosen = evenly_spaced(len(dataset), count)
    is_quick = getattr(sizes, "is_table", True) or args.disable_tqdm
    readable = []
    with tqdm(total=len(chosen), desc="Measuring samples", disable=is_quick) as bar:
        for start in range(0, len(chosen), _SAMPLES_PER_UPDATE):
            few = chosen[start : start + _SAMPLES_PER_UPDATE]
            # without samples whose file can't be read, and with `on_bad_sample="skip"` all that have no size
            readable += measurable(sizes, few, args.on_bad_sample == "skip")
            bar.update(len(few))
    return GlobalBatch(tuple(readable))


# Samples that are larger than the limit of a microbatch: they are reported, and run alone.


_UNLIMITED_TOKENS = 10**15  # tokens; the limit of stages that keep no activations
_REMEDY = (
    "Each gets a microbatch of its own, which is predicted to need more memory than a rank may fill. If that is too "
    "much, set `activation_checkpointing`, raise `pp_size`, `tp_size` or `cp_size`, or leave such samples out."
)


def allowed_bytes(args: Any, device: Hardware) -> float | None:
    """Returns the memory of a rank that the estimate of a microbatch may fill, `None` where it is unknown."""
    # the device is the same on all ranks, which have to arrange alike
    return usable_bytes(device, None if args.memory_limit_gib == AUTO else args.memory_limit_gib)


@dataclass(frozen=True)
class LargeSamples:
    """How samples compare with the limits of microbatches."""

    limits: Mapping[str, int]  # module -> maximum tokens of a microbatch
    largest: Mapping[str, int]  # module -> tokens of the largest sample
    num_over: int  # larger than a microbatch in one of the modules
    num_samples: int  # that were compared
    are_all: bool  # whether these are all samples of the dataset

    @classmethod
    def of(cls, start: StartSizes, limits: Mapping[str, int]) -> LargeSamples:
        """Compares the sizes that are known before the first step."""
        over = _over(start.sizes, limits)
        largest = {name: int(start.sizes.tokens[name].max(initial=0)) for name in limits}
        return cls(limits, largest, int(over.sum()), len(over), start.are_all)

    def __str__(self) -> str:
        limits = " and ".join(
            f"{limit:,} tokens in `{name}`" for name, limit in self.limits.items() if limit < _UNLIMITED_TOKENS
        )
        larger = f"{self.num_over:,} of {self._samples} are larger" if self.num_over else f"all {self._samples} fit"
        return f"A microbatch may have {limits or 'any number of tokens'}; {larger}."

    @property
    def _samples(self) -> str:
        return f"{self.num_samples:,} {'' if self.are_all else 'measured '}samples"

    @property
    def warning(self) -> str:
        """A warning if a sample is larger than a limit, otherwise empty."""
        if not self.num_over:
            return ""
        over = ", ".join(
            f"the largest has {self.largest[name]:,} tokens in `{name}` of at most {limit:,}"
            for name, limit in self.limits.items()
            if self.largest[name] > limit
        )
        return f"{self.num_over:,} of {self._samples} are larger than a microbatch may be: {over}. {_REMEDY}"


class LimitWatch:
    """Warns once of samples above the limit of a microbatch, unless the report before the first step has warned."""

    def __init__(self):
        self.has_warned = False

    def saw(self, step: StepPlan, workloads: Workloads | None) -> None:
        """Compares the tokens of a step's samples with the limits that come with them in `workloads`."""
        if self.has_warned or workloads is None:
            return
        for name, limit in workloads.token_limits.items():
            tokens = workloads.tokens[name]
            largest = int(np.argmax(tokens)) if len(tokens) else 0
            if len(tokens) and tokens[largest] > limit:
                self.has_warned = True
                logger.warning(
                    f"Sample {step.samples[largest]} has {tokens[largest]:,} tokens in `{name}`, where a microbatch "
                    f"may have {limit:,}. {_REMEDY} Further such samples are not reported."
                )
                return


def _over(sizes: SampleSizes, limits: Mapping[str, int]) -> np.ndarray:
    """bool `[samples]`: whether a sample is larger than a microbatch may be in one of the modules."""
    over = np.zeros(sizes.num_samples, dtype=bool)
    for name, limit in limits.items():
        over |= sizes.tokens[name] > limit
    return over


# `memory_limit_gib="auto"`: the memory of the first steps corrects the limits of microbatches.

FIRST, LAST = 2, 4
"""Steps of a run that are measured: when the first one ends, the optimizer makes its state."""
_LEAST, _MOST = 0.5, 2.0  # range of a plausible ratio; beyond it something else is wrong

# the ratio, and the epoch and position of the last global batch that was planned without it
Mark = tuple[float, int, int]


class MemoryRatio:
    """
    Learns by how much the memory of ranks differs from the estimate, for the limits of global batches.

    The ratio is the largest of all ranks over a few steps. It holds for all global batches after the last one that was
    handed out when it was learned, on all ranks; a checkpoint keeps both, so that a resumed run plans as before.
    """

    def __init__(
        self,
        planner: StepPlanner,
        typical: SampleSizes,
        measure: Callable[[], float | None],
        learned: Mark | None = None,
    ):
        self.planner = planner  # with limits by the estimate
        self.typical = typical  # sizes of a typical global batch
        self.measure = measure  # see [`allocated_since`]
        self.learned: Mark | None = None
        self.limits: Mapping[str, int] | None = None
        self._num_steps = 0
        self._largest = 0.0
        self._last = (0, 0)
        if learned is not None:
            self._learn(*learned)

    def limits_of(self, global_batch: GlobalBatch) -> Mapping[str, int] | None:
        """Module -> maximum tokens of a microbatch of this global batch; `None` for the limits by the estimate."""
        self._last = global_batch.epoch, global_batch.position
        if self.learned is None or self._last <= self.learned[1:]:
            return None
        return self.limits

    def saw_step(self, engine: ParallelEngine) -> None:
        """Measures the step that has just run. Collective for the last of the measured steps."""
        if self.learned is not None:
            return
        self._num_steps += 1
        allocated = self.measure()
        if allocated is not None and self._num_steps >= FIRST and engine.account is not None:
            predicted = engine.account.predict()
            if predicted is not None:
                self._largest = max(self._largest, allocated / predicted.total)
        if self._num_steps == LAST:
            ratio = max(engine.world.all_gather(self._largest, "comparing memory"))
            if ratio > 0:
                self._learn(min(max(ratio, _LEAST), _MOST), *self._last)

    def _learn(self, ratio: float, epoch: int, position: int) -> None:
        """Finds the limits that allow for a ratio."""
        self.learned = ratio, epoch, position
        assert self.planner.memory_bytes is not None
        corrected = replace(self.planner, memory_bytes=self.planner.memory_bytes / ratio)
        try:
            self.limits = corrected.with_token_limits(self.typical).token_limits
        except ValueError as error:
            logger.warning(
                f"Ranks need {ratio:.2f} times the memory that is predicted, with which no microbatch fits: {error} "
                "Microbatches stay as they are."
            )
            self.limits = self.planner.token_limits
            return
        assert self.limits is not None
        limits = " and ".join(f"{limit:,} tokens in `{name}`" for name, limit in self.limits.items())
        logger.info(f"Ranks need {ratio:.2f} times the memory that is predicted; a microbatch may have {limits}.")


def allocated_since(device: torch.device) -> float | None:
    """Peak of allocated bytes of this rank since the last call; `None` where nothing counts them."""
    if device.type != "cuda":
        return None
    peak = float(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak
