"""What the Trainer knows of the sizes of its training samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..data.layer_tokens import measure_layers
from ..data.sample_sizes import SizeSource, size_source

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer


class TrainingSizes:
    """
    Sizes of the training samples, found out once on each rank.

    Args:
        trainer ([`MultimodalParallelTrainer`]): The Trainer.
    """

    def __init__(self, trainer: MultimodalParallelTrainer):
        self.trainer = trainer
        self._found: dict[int, SizeSource | None] = {}
        self._layers: dict[str, Any] | None = None

    def of_rank(self, dataset: Any) -> SizeSource | None:
        """
        Dataset indices -> sizes, as this rank alone finds them out; `None` where nothing says them.

        Args:
            dataset: The training dataset, or the window of a stream.
        """
        source = self._rows(dataset)
        return None if source is None else source.with_layers(self._measured(dataset))

    def shared(self, dataset: Any) -> SizeSource | None:
        """The same on all ranks, as the first one measures the encoders. Collective."""
        with self.trainer.args.main_process_first(desc="sizes of samples"):
            source = self._rows(dataset)
        layers = [self._measured(dataset) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(
            layers, src=0, device=self.trainer._engine.device if dist.get_backend() == "nccl" else None
        )
        return None if source is None else source.with_layers(layers[0] or {})

    def _rows(self, dataset: Any) -> SizeSource | None:
        """Sizes in which a row of features is a token of the encoder."""
        if id(dataset) not in self._found:
            trainer = self.trainer
            self._found[id(dataset)] = size_source(
                dataset,
                trainer.data_collator,
                trainer._engine.spec,
                trainer.args.token_columns,
                trainer.sample_tokens,
                trainer.processing_class,
            )
        return self._found[id(dataset)]

    def _measured(self, dataset: Any) -> dict[str, Any]:
        """Encoder -> what its layers see of rows of features."""
        if self._layers is None:
            trainer, source = self.trainer, self._rows(dataset)
            self._layers = measure_layers(trainer.model, trainer._engine.spec, dataset, trainer.data_collator, source)
        return self._layers
