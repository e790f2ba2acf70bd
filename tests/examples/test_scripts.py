"""Examples that are scripts train as they say."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hf_mmparallel import MultimodalModel

from ..distributed import run_distributed

FOLDER = str(Path(__file__).resolve().parents[2] / "examples")


def script(name: str) -> Any:
    """The module of an example, whose imports take seconds."""
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    return importlib.import_module(name)


def test_the_example_of_trl_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    flags = "--use_cpu --disable_tqdm true --num_train_samples 160 --per_device_train_batch_size 8 --hidden_size 32"
    monkeypatch.setattr(sys, "argv", ["sft_digits.py", *flags.split(), "--output_dir", str(tmp_path)])
    torch.set_num_threads(1)
    script("sft_digits").main()
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", printed)]
    assert len(losses) == 2 and losses[1] < 0.9 * losses[0]
    assert re.search(r"^Trained in \d+ s to a loss of", printed, re.MULTILINE)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, folder: Path, packing: bool) -> list[float]:
    """Rows and length of a batch, loss and accuracy, as the script prints them."""
    arguments = "--use_cpu --disable_tqdm true --num_train_samples 64 --num_eval_samples 32 --hidden_size 32"
    batches = "--per_device_train_batch_size 16 --per_device_eval_batch_size 16 --logging_steps 1"
    flags = f"{arguments} {batches} --packing {packing} --output_dir {folder}"
    monkeypatch.setattr(sys, "argv", ["train_packed_stock_trainer.py", *flags.split()])
    torch.set_num_threads(1)
    script("train_packed_stock_trainer").main()
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


@pytest.mark.deep
def test_a_model_that_reads_and_draws_trains_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
):
    flags = "--use_cpu --disable_tqdm true --max_steps 12 --logging_steps 4 --global_batch_size 16"
    monkeypatch.setattr(sys, "argv", ["train_any_to_any.py", *flags.split(), "--output_dir", str(tmp_path)])
    torch.set_num_threads(1)
    trainer = script("train_any_to_any").main()
    logs = [log for log in trainer.state.log_history if "loss/image" in log]
    for name in ("loss/image", "loss/language_model"):
        assert logs[-1][name] < 0.95 * logs[0][name], name
    assert Image.open(tmp_path / "drawn.png").size == (500, 500)
    assert "held-out digits" in capsys.readouterr().out
    trainer.create_model_card()  # as a push to the Hub does
    assert (tmp_path / "README.md").read_text().count("](drawn.png)") == 1
    loaded = MultimodalModel.from_pretrained(tmp_path)
    drawn = script("train_any_to_any").draw(loaded.eval(), [3, 7])
    assert drawn.shape == (2, 8, 8) and drawn.abs().max() <= 1


def _train_rows(num_steps: int, mode: str = "row") -> list[float]:
    return script("context_parallel_loop").train(num_steps, mode)


@pytest.mark.distributed
def test_losses_are_those_of_one_rank():
    alone = _train_rows(8)
    assert alone[-1] < alone[0] - 0.5
    for mode, num_ranks in (("row", 2), ("segments", 3)):
        for losses in run_distributed(_train_rows, num_ranks, 8, mode, timeout=90):
            assert losses == pytest.approx(alone, abs=2e-5)
