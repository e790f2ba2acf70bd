"""Sizes of the training samples, before the first step and during a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.logging import tqdm

from ..data.global_batches import GlobalBatch
from ..data.image_sizes import UnknownSizeError
from ..data.layer_tokens import measure_layers
from ..data.measured_batches import median_of
from ..data.randomness import seeded
from ..data.sample_sizes import SizeSource, size_source
from ..data.size_sources import LayerTokens, draw_samples, evenly_spaced, measure_samples
from ..data.streams import StreamSizes, StreamWindow
from ..plan import LANGUAGE_MODEL, ModelSpec, PlannedFor, SampleSizes
from ..steps.step_planner import SizeFunction
from ..world import World, raise_on_all_ranks
from .arguments import MultimodalTrainingArguments

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
    """Sizes that are equal on all ranks."""

    # dataset indices -> sizes, or how each rank measures them; `None` where sizes are unknown
    source: SizeSource | None
    typical: SampleSizes | None  # of a global batch whose samples are like the mean one
    median: SampleSizes | None  # of one sample, used for samples of unknown size

    @property
    def is_measured_by_batch(self) -> bool:
        """Whether each rank measures a part of each global batch."""
        return self.source is not None and not self.source.is_table and not isinstance(self.source, StreamSizes)


@dataclass
class MeasuredSizes:
    """Sizes that [`TrainingSizes`] has measured, each with the dataset or the source that it belongs to."""

    source: tuple[Any, SizeSource | None] | None = None
    layers: dict[str, LayerTokens] | None = None
    with_layers: tuple[SizeSource, SizeSource] | None = None
    start: tuple[Any, StartSizes | None] | None = None


class TrainingSizes:
    """Sizes of the training samples, measured once; results are added to `measured`."""

    def __init__(self, context: RunContext, measured: MeasuredSizes | None = None):
        self.context = context
        self.measured = MeasuredSizes() if measured is None else measured

    def of_rank(self, dataset: Any) -> SizeSource | None:
        """Returns dataset indices -> sizes, as this rank alone measures them; `None` where sizes are unknown."""
        source = self._in_features(dataset)
        if source is None:
            return None
        measured = self.measured
        if measured.with_layers is None or measured.with_layers[0] is not source:
            measured.with_layers = source, source.with_layers(self._layers(dataset, source))
        return measured.with_layers[1]

    def at_start(self, dataset: Any, global_batch_size: int) -> StartSizes | None:
        """Returns sizes that this rank alone measures before the first step; `None` where they are unknown."""
        if self.measured.start is None or self.measured.start[0] is not dataset:
            with seeded(self.context.args.seed):  # only this rank reads samples here
                self.measured.start = dataset, self._at_start(dataset, global_batch_size)
        return self.measured.start[1]

    def _at_start(self, dataset: Any, global_batch_size: int) -> StartSizes | None:
        source = self.of_rank(dataset)
        if source is None:
            return None
        if source.is_table:
            result = StartSizes(source(range(len(source))), True)
        else:
            count = _NUM_MEASURED
            if isinstance(source, StreamSizes):
                dataset, count = copy.copy(source.window), _NUM_STREAMED  # training reads the stream itself
                source = source.of_window(dataset)
            global_batch = representative_batch(dataset, source, max(count, global_batch_size), self.context.args)
            readable = _readable(source, global_batch.samples, skip=True)
            if not readable:
                return None
            result = StartSizes(source(readable), False)
        return result if result.sizes.known and result.sizes.num_samples else None

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
            layers = self.measured.layers if local else None
            return CommonSizes(None if local else source, typical, median), layers

        # The first rank measures the encoders, and all samples that are measured in advance, because a file may be
        # readable on one host and not on another.
        with raise_on_all_ranks("measuring samples"):
            shared, layers = self.context.world.from_first_rank(find)
            source = None if layers is None else self._in_features(dataset)
        return shared if source is None or layers is None else replace(shared, source=source.with_layers(layers))

    def _in_features(self, dataset: Any) -> SizeSource | None:
        """Sizes in which an encoder has as many tokens as features."""
        if self.measured.source is None or self.measured.source[0] is not dataset:
            context = self.context
            source = size_source(
                dataset,
                context.collator,
                context.spec,
                context.args.token_columns,
                context.sample_tokens,
                context.processing_class,
                num_proc=context.args.dataloader_num_workers or None,
            )
            self.measured.source = dataset, source
        return self.measured.source[1]

    def _layers(self, dataset: Any, source: SizeSource) -> dict[str, LayerTokens]:
        """Encoder -> tokens in its layers for a number of features."""
        if self.measured.layers is None:
            context = self.context
            lean, collator = context.drop_columns(dataset, "Training")
            with seeded(context.args.seed):  # only this rank reads samples here
                self.measured.layers = measure_layers(context.model, context.spec, lean, collator, source)
        return self.measured.layers


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
            readable += _readable(sizes, few, args.on_bad_sample == "skip")
            bar.update(len(few))
    return GlobalBatch(tuple(readable))


def _readable(sizes: SizeFunction, indices: Sequence[int], skip: bool) -> list[int]:
    errors = measure_samples(sizes, indices)
    for error in errors.values():
        if not skip and not isinstance(error, (OSError, UnknownSizeError)):
            raise error  # the others are reported when they are drawn
    return [index for index in indices if index not in errors]
