"""The example of packed rows trains as it says: to the losses of padded batches, from far fewer tokens."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_packed_stock_trainer as example  # noqa: E402


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, folder: Path, packing: bool) -> list[float]:
    """Rows and length of a batch, loss and accuracy, as the script prints them."""
    arguments = "--use_cpu --disable_tqdm true --num_train_samples 64 --num_eval_samples 32 --hidden_size 32"
    batches = "--per_device_train_batch_size 16 --per_device_eval_batch_size 16 --logging_steps 1"
    flags = f"{arguments} {batches} --packing {packing} --output_dir {folder}"
    monkeypatch.setattr(sys, "argv", ["train_packed_stock_trainer.py", *flags.split()])
    torch.set_num_threads(1)
    example.main()
    printed = capsys.readouterr().out
    found = re.search(r"is (\d+) rows of (\d+) tokens\.\n.* a loss of ([\d.]+)\.\n.* right: ([\d.]+)%", printed)
    assert found, printed
    return [float(number) for number in found.groups()]


def test_packed_rows_train_as_padded_batches(monkeypatch, capsys, tmp_path):
    rows, length, loss, accuracy = run(monkeypatch, capsys, tmp_path, packing=True)
    padded_rows, padded_length, padded_loss, padded_accuracy = run(monkeypatch, capsys, tmp_path, packing=False)
    assert (rows, padded_rows) == (1, 16)
    assert length < 0.6 * padded_rows * padded_length
    assert loss == pytest.approx(padded_loss, abs=2e-4) and loss > 1
    assert accuracy == padded_accuracy
