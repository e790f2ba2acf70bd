"""What the Trainer knows of the sizes of its training samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..data.layer_tokens import measure_layers
from ..data.randomness import seeded
from ..data.sample_sizes import SizeSource, size_source
from ..data.size_sources import LayerTokens
from ..runtime.collectives import from_first_rank
from ..runtime.failure import shared_failure
from .loaders import without_unused_columns

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer


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

    def of_rank(self, dataset: Any) -> SizeSource | None:
        """
        Dataset indices -> sizes, as this rank alone finds them out; `None` where nothing says them.

        Args:
            dataset: The training dataset, or the window of a stream.
        """
        source = self._rows(dataset)
        return None if source is None else source.with_layers(self._measured(dataset, source))

    def shared(self, dataset: Any) -> SizeSource | None:
        """
        The same on all ranks. Collective.

        The first rank measures the encoders, and all samples that are measured in advance; ranks read a file with
        different luck.
        """

        def find() -> tuple[SizeSource | None, dict[str, LayerTokens] | None]:
            source = self.of_rank(dataset)
            local = source is not None and not source.is_table
            return (None, self._layers) if local else (source, None)

        with shared_failure("measuring samples"):
            table, layers = from_first_rank(find, self.trainer.args.device)
            if layers is None:
                return table
            own = self._rows(dataset)
        return None if own is None else own.with_layers(layers)

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
