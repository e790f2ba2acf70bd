"""Runs without a plan on gloo ranks under DDP, accelerate's FSDP2 and DeepSpeed, by the arguments that users give."""

import importlib
import os
import warnings
from typing import Any

from accelerate.state import DistributedType, PartialState
from torch import Tensor
from transformers import Trainer

FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """The arguments of a DeepSpeed run."""
    settings = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }
    return {"deepspeed": settings}


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"use_cpu": True},
    "fsdp2": FSDP2,
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
}
"""Name -> the arguments that choose it."""


def arguments_of(engine: str) -> dict[str, Any]:
    """
    The arguments that choose an engine, in a process in which it runs on the CPU: accelerate knows FSDP and DeepSpeed
    on accelerators only, so that this rank says that it has one.
    """
    if engine == "ddp":
        return ENGINES[engine]
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="false")
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    warnings.simplefilter("ignore")  # those of accelerate and DeepSpeed about this torch and the missing accelerator
    from hf_mmparallel.trainer import arguments

    arguments.launched_processes = lambda: (1, "")  # else the CPU is chosen, where accelerate has DDP only
    if engine != "fsdp2":
        transport: Any = importlib.import_module("deepspeed.comm.torch")  # `deepspeed.comm.torch` is torch itself
        transport.build_shm_op = lambda: None  # a C++ extension that each process would compile or wait for
    return {"use_cpu": False, **ENGINES[engine]}


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Name -> weight, of all ranks. Collective."""
    state: Any = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name: value.detach().float().clone() for name, value in (state or {}).items()}
