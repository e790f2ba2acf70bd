"""What the Trainer knows of the sizes of its training samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers.utils.logging import tqdm

from ..data.drawn_sizes import median_of
from ..data.draws import Draw
from ..data.image_sizes import UnknownSizeError
from ..data.layer_tokens import measure_layers
from ..data.randomness import seeded
from ..data.sample_sizes import SizeSource, size_source
from ..data.size_sources import LayerTokens, keep_sizes, measure_samples, spread
from ..data.streams import StreamSizes, StreamWindow
from ..plan import LANGUAGE_MODEL, SampleSizes
from ..steps.step_planner import SizeFunction
from ..world import shared_failure
from .loaders import without_unused_columns

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer

_MEASURED = 256  # samples, where not all sizes are known before they are drawn
_STREAMED = 64
_TOGETHER = 64  # samples between two movements of the bar


@dataclass(frozen=True)
class StartSizes:
    """
    Sizes of training samples that are known before the first step.

    Args:
        sizes (`SampleSizes`): Of all samples, or of some from all over the dataset.
        are_all (`bool`): Whether they are of all samples.
    """

    sizes: SampleSizes
    are_all: bool


@dataclass(frozen=True)
class SharedSizes:
    """
    What all ranks know alike.

    Args:
        source (`Callable[[Sequence[int]], SampleSizes]`, *optional*):
            Dataset indices -> sizes, or how each rank measures them; `None` where nothing says them.
        typical (`SampleSizes`, *optional*): Of a global batch of samples like the mean one.
        median (`SampleSizes`, *optional*): Of one sample, in place of those of which nothing says the size.
    """

    source: SizeSource | None
    typical: SampleSizes | None
    median: SampleSizes | None

    @property
    def is_measured_when_drawn(self) -> bool:
        """Whether each rank measures a part of each draw."""
        return self.source is not None and not self.source.is_table and not isinstance(self.source, StreamSizes)


class TrainingSizes:
    """
    Sizes of the training samples, found out once.

    Args:
        trainer ([`MultimodalParallelTrainer`]): The Trainer.
    """

    def __init__(self, trainer: MultimodalParallelTrainer):
        self.trainer = trainer
        self._found: tuple[Any, SizeSource | None] | None = None
        self._layers: dict[str, LayerTokens] | None = None
        self._layered: tuple[SizeSource, SizeSource] | None = None
        self._start: tuple[Any, StartSizes | None] | None = None

    def of_rank(self, dataset: Any) -> SizeSource | None:
        """
        Dataset indices -> sizes, as this rank alone finds them out; `None` where nothing says them.

        Args:
            dataset: The training dataset, or the window of a stream.
        """
        source = self._rows(dataset)
        if source is None:
            return None
        if self._layered is None or self._layered[0] is not source:
            self._layered = source, source.with_layers(self._measured(dataset, source))
        return self._layered[1]

    def at_start(self, dataset: Any) -> StartSizes | None:
        """
        What this rank alone finds out before the first step; `None` where nothing says how large samples are.

        Args:
            dataset: The training dataset, or the window of a stream.
        """
        if self._start is None or self._start[0] is not dataset:
            with seeded(self.trainer.args.seed):  # only this rank reads samples here
                self._start = dataset, self._at_start(dataset)
        return self._start[1]

    def _at_start(self, dataset: Any) -> StartSizes | None:
        source = self.of_rank(dataset)
        if source is None:
            return None
        if source.is_table:
            found = StartSizes(source(range(len(source))), True)
        else:
            window, count = None, _MEASURED
            if isinstance(source, StreamSizes):
                window, count = copy.copy(source.window), _STREAMED  # the stream itself is read when training begins
                source = source.of_window(window)
            draw = representative_draw(self.trainer, source, window, max(count, self.trainer.global_batch_size))
            readable = _readable(source, draw.samples, skip=True)
            if not readable:
                return None
            found = StartSizes(source(readable), False)
        return found if found.sizes.known and found.sizes.num_samples else None

    def shared(self, dataset: Any) -> SharedSizes:
        """
        The same on all ranks. Collective.

        The first rank measures the encoders, and all samples that are measured in advance; ranks read a file with
        different luck.
        """

        def find() -> tuple[SharedSizes, dict[str, LayerTokens] | None]:
            source, start = self.of_rank(dataset), self.at_start(dataset)
            typical = None if start is None else start.sizes.like_the_mean(self.trainer.global_batch_size)
            median = None if start is None else median_of(start.sizes, LANGUAGE_MODEL)
            local = source is not None and not source.is_table
            return SharedSizes(None if local else source, typical, median), self._layers if local else None

        with shared_failure("measuring samples"):
            found, layers = self.trainer.world.from_first_rank(find)
            own = None if layers is None else self._rows(dataset)
        return found if own is None or layers is None else replace(found, source=own.with_layers(layers))

    def _rows(self, dataset: Any) -> SizeSource | None:
        """Sizes in which a row of features is a token of the encoder."""
        if self._found is None or self._found[0] is not dataset:
            trainer = self.trainer
            source = size_source(
                dataset,
                trainer.data_collator,
                trainer.model_spec,
                trainer.args.token_columns,
                trainer.sample_tokens,
                trainer.processing_class,
                num_proc=trainer.args.dataloader_num_workers or None,
            )
            self._found = dataset, source
        return self._found[1]

    def _measured(self, dataset: Any, source: SizeSource) -> dict[str, LayerTokens]:
        """Encoder -> what its layers see of rows of features."""
        if self._layers is None:
            trainer = self.trainer
            lean, collator = without_unused_columns(trainer, dataset, "Training")
            with seeded(trainer.args.seed):  # only this rank reads samples here
                self._layers = measure_layers(trainer.model, trainer.model_spec, lean, collator, source)
        return self._layers


def representative_draw(
    trainer: MultimodalParallelTrainer,
    sizes: SizeFunction | None,
    window: StreamWindow | None,
    count: int | None = None,
) -> Draw:
    """
    Samples for a full global batch, or `count`: from all over the training set, without those whose file can't be
    read, or that have no size if they may be skipped; or the first of a stream. Empty if there are none.
    """
    first = Draw(tuple(range(trainer.global_batch_size if count is None else count)))
    if sizes is None and window is None:
        return first
    if window is not None:
        return window.fetch(first)
    assert sizes is not None
    skip = trainer.args.on_bad_sample == "skip"
    chosen = spread(len(trainer.train_dataset), len(first.samples))
    is_quick = getattr(sizes, "is_table", True) or trainer.args.disable_tqdm
    readable = []
    with tqdm(total=len(chosen), desc="Measuring samples", disable=is_quick) as bar:
        for start in range(0, len(chosen), _TOGETHER):
            few = chosen[start : start + _TOGETHER]
            readable += _readable(sizes, few, skip)
            bar.update(len(few))
    keep_sizes(sizes, readable)
    return Draw(tuple(readable))


def _readable(sizes: SizeFunction, indices: Sequence[int], skip: bool) -> list[int]:
    """Those of some samples that can be measured."""
    errors = measure_samples(sizes, indices)
    for error in errors.values():
        if not skip and not isinstance(error, (OSError, UnknownSizeError)):
            raise error  # others are told of when their turn comes
    return [index for index in indices if index not in errors]
