"""What the Trainer knows of the sizes of its training samples."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.draws import Draw
from ..data.layer_tokens import measure_layers
from ..data.randomness import seeded
from ..data.sample_sizes import SizeSource, size_source
from ..data.size_sources import LayerTokens
from ..data.streams import StreamSizes, StreamWindow
from ..plan import SampleSizes
from ..runtime.collectives import from_first_rank
from ..runtime.failure import shared_failure
from ..search.steps import SizeFunction
from .loaders import without_unused_columns

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer

_MEASURED = 256  # samples, where not all sizes are known before they are drawn
_STREAMED = 64


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
        self._start: tuple[Any, StartSizes | None] | None = None

    def of_rank(self, dataset: Any) -> SizeSource | None:
        """
        Dataset indices -> sizes, as this rank alone finds them out; `None` where nothing says them.

        Args:
            dataset: The training dataset, or the window of a stream.
        """
        source = self._rows(dataset)
        return None if source is None else source.with_layers(self._measured(dataset, source))

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
            readable = [index for index in draw.samples if _has_size(source, index, skip=True)]
            if not readable:
                return None
            found = StartSizes(source(readable), False)
        return found if found.sizes.known and found.sizes.num_samples else None

    def shared(self, dataset: Any) -> tuple[SizeSource | None, SampleSizes | None]:
        """
        The sizes, and those of a typical global batch, the same on all ranks. Collective.

        The first rank measures the encoders, and all samples that are measured in advance; ranks read a file with
        different luck.
        """

        def find() -> tuple[SizeSource | None, dict[str, LayerTokens] | None, SampleSizes | None]:
            source, start = self.of_rank(dataset), self.at_start(dataset)
            typical = None if start is None else start.sizes.like_the_mean(1)
            local = source is not None and not source.is_table
            return (None, self._layers, typical) if local else (source, None, typical)

        with shared_failure("measuring samples"):
            table, layers, typical = from_first_rank(find, self.trainer.args.device)
            typical = None if typical is None else typical.like_the_mean(self.trainer.global_batch_size)
            if layers is None:
                return table, typical
            own = self._rows(dataset)
        return None if own is None else own.with_layers(layers), typical

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
    count, length = len(first.samples), len(trainer.train_dataset)
    chosen = np.linspace(0, length - 1, min(count, length)).astype(int).tolist()
    skip = trainer.args.on_bad_sample == "skip"
    return Draw(tuple(index for index in chosen if _has_size(sizes, index, skip)))


def _has_size(sizes: SizeFunction, index: int, skip: bool) -> bool:
    """Whether a sample can be measured."""
    try:
        sizes([index])
    except Exception as error:
        if skip or isinstance(error, OSError):  # it is told of when its turn comes
            return False
        raise
    return True
