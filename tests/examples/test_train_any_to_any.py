"""The example of a model that reads and draws: its samples train both, and it writes what it drew."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_any_to_any as example  # noqa: E402

from hf_mmparallel import MultimodalModel


@pytest.mark.deep
def test_it_trains_reads_and_draws(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
    flags = "--use_cpu --disable_tqdm true --max_steps 12 --logging_steps 4 --global_batch_size 16"
    monkeypatch.setattr(sys, "argv", ["train_any_to_any.py", *flags.split(), "--output_dir", str(tmp_path)])
    torch.set_num_threads(1)
    trainer = example.main()
    logs = [log for log in trainer.state.log_history if "loss/image" in log]
    for name in ("loss/image", "loss/language_model"):
        assert logs[-1][name] < 0.95 * logs[0][name], name
    assert Image.open(tmp_path / "drawn.png").size == (500, 500)
    assert "held-out digits" in capsys.readouterr().out
    trainer.create_model_card()  # as a push to the Hub does
    assert (tmp_path / "README.md").read_text().count("](drawn.png)") == 1
    loaded = MultimodalModel.from_pretrained(tmp_path)
    drawn = example.draw(loaded.eval(), [3, 7])
    assert drawn.shape == (2, 8, 8) and drawn.abs().max() <= 1
