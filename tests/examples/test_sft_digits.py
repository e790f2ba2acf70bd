"""The example of TRL trains on packed rows."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import sft_digits as example  # noqa: E402


def test_it_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    flags = "--use_cpu --disable_tqdm true --num_train_samples 160 --per_device_train_batch_size 8 --hidden_size 32"
    monkeypatch.setattr(sys, "argv", ["sft_digits.py", *flags.split(), "--output_dir", str(tmp_path)])
    torch.set_num_threads(1)
    example.main()
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", printed)]
    assert len(losses) == 2 and losses[1] < 0.9 * losses[0]
    assert re.search(r"^Trained in \d+ s to a loss of", printed, re.MULTILINE)
