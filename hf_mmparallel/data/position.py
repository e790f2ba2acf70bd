"""The position of a run in its training set, in samples, so that it can resume with another batch size."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .._files import readable
from .global_batches import GlobalBatch, GlobalBatchSampler

FILE = "data_position.json"


@dataclass(frozen=True)
class DataPosition:
    """The position of a run in its training set; the fields are those of the file in a checkpoint."""

    epoch: int = 0
    num_samples: int = 0  # of the epoch, drawn so far, including skipped ones
    num_steps: int = 0  # that drew them
    global_step: int = 0  # steps of the run
    batch_size: int | None = None  # global batch size at the start of the epoch, on which the order may depend
    num_skipped: int = 0  # samples of the run that could not be read
    # what was learned of memory, and the last global batch that was planned without it
    memory_ratio: list | None = None

    @classmethod
    def load(cls, folder: str | Path) -> DataPosition | None:
        """Reads the position from a checkpoint; `None` if it has none. Raises `ValueError` for a damaged file."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        with readable(path):
            return cls(**json.loads(path.read_text()))

    def save(self, folder: str | Path) -> None:
        """Writes the position into a checkpoint."""
        (Path(folder) / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def after(self, global_batch: GlobalBatch, global_batch_size: int) -> DataPosition:
        """The position after one more step; `global_batch_size` is that of a full global batch."""
        goes_on = global_batch.epoch == self.epoch and self.num_steps > 0
        return dataclasses.replace(
            self,
            epoch=global_batch.epoch,
            num_samples=global_batch.position,
            num_steps=self.num_steps + 1 if goes_on else 1,
            batch_size=self.batch_size if goes_on else global_batch_size,
        )

    def resume(
        self,
        global_batches: GlobalBatchSampler,
        num_samples: int | None,  # per epoch, `None` for a stream of unknown length
    ) -> tuple[int, int]:
        """Continues global batches; returns the epoch and its number of finished steps at the current batch size."""
        num_steps = self.num_steps
        if num_samples is not None:
            left = global_batches.num_batches(max(0, num_samples - self.num_samples))
            if not left:
                return self.epoch + 1, 0
            num_steps = global_batches.num_batches(num_samples) - left
        global_batches.resume(self.epoch, self.num_samples, num_steps, self.batch_size)
        return self.epoch, num_steps
