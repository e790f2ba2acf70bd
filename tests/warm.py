"""What each rank would import or compute anew; the server of ranks imports this once, before it forks them."""

import contextlib
import importlib

import torch

from hf_mmparallel.cost.device_table import find_device
from hf_mmparallel.modeling import build_model_spec
from tests import tiny

OFTEN = ("llama", "llava", "qwen2_vl", "gemma3")  # families that many tests train


def warm_up() -> None:
    """Imports what a run of the Trainer imports late, and fills caches."""
    torch.set_num_threads(1)  # a fork would lose the threads of operations
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed")  # accelerate imports it in each run where it is installed
    for module in ("peft", "hf_mmparallel.modeling", "tests.trainer.runs", "rich._emoji_codes"):
        importlib.import_module(module)
    find_device("h100")
    for family in OFTEN:
        build_model_spec(tiny.FAMILIES[family]())


warm_up()
