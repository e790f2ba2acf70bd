"""Small configurations without weights, and what a command prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_mmparallel.cli.main import main

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
IMAGE_TOKEN = 199


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The folder of a vision-language model's configuration."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=28, patch_size=14),
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=200, num_key_value_heads=4),
        image_token_index=IMAGE_TOKEN,
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_model(tmp_path_factory) -> Path:
    """The folder of a language model's configuration."""
    folder = tmp_path_factory.mktemp("text")
    transformers.LlamaConfig(**SIZES, vocab_size=200, num_key_value_heads=4).save_pretrained(folder)
    return folder


@pytest.fixture
def constants(monkeypatch) -> dict[str, float]:
    """Constants that `profile` takes for those of the device, which takes seconds to measure."""
    found = {"launch_us": 4.0, "masked_attention_share": 0.5, "block_attention_share": 0.9}
    found |= {f"{name}_efficiency": 0.5 for name in ("matmul", "attention", "memory")}
    found |= {"bf16_tflops": 0.1, "fp16_tflops": 0.1, "tf32_tflops": 0.1, "fp32_tflops": 0.1, "memory_gb_per_s": 10.0}
    monkeypatch.setattr("hf_mmparallel.planning.device_constants.measure_constants", lambda *_: found)
    return found


@pytest.fixture
def run(capsys) -> Callable[..., str]:
    """Runs a command that succeeds and returns what it prints, without the widths of columns."""

    def call(*arguments) -> str:
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
        return " ".join(capsys.readouterr().out.split())

    return call


@pytest.fixture
def fail(capsys) -> Callable[..., str]:
    """Runs a command that fails and returns its error, which is one line, after those of its phases."""

    def call(*arguments) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        *phases, error = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ") and all(line.startswith("Planning") for line in phases)
        return error

    return call


@pytest.fixture
def figures(tmp_path, run) -> Callable[..., dict]:
    """Runs `plan` or `simulate` and returns the figures that it writes."""

    def call(*arguments) -> dict:
        path = tmp_path / "figures.json"
        run(*arguments, "--json", path)
        return json.loads(path.read_text())

    return call
