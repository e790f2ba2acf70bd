"""Sizes of the training samples, before the first step and during a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.logging import tqdm

from ..cost.step_planner import SizeFunction
from ..data.global_batches import GlobalBatch
from ..data.image_rules import column_rules
from ..data.layer_tokens import measure_layers
from ..data.measured_batches import median_of
from ..data.randomness import seeded
from ..data.sample_sizes import SizeSource, size_source
from ..data.size_sources import LayerTokens, StreamSizes, draw_samples, evenly_spaced, measurable
from ..data.streams import StreamWindow
from ..plan import LANGUAGE_MODEL, ModelSpec, PlannedFor, SampleSizes
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
