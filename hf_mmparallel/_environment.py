"""The environment variables that the package reads; nothing else in it looks at the environment."""

import json
import os
from typing import Any

LAUNCH_SETTINGS = "HF_MMPARALLEL_LAUNCH"  # with which `hf-mmparallel launch` tells its workers how to reach it
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_processes() -> tuple[int, str]:
    """How many processes the launcher says it started, and the variable that says so; 1 without a launcher."""
    settings = launch_settings()
    if settings is not None and joins_job():
        return settings["num_processes"], LAUNCH_SETTINGS
    counts = [(int(os.environ[name]), name) for name in _WORLD_SIZES if os.environ.get(name, "").isdigit()]
    return max(counts, default=(1, ""), key=lambda pair: pair[0])


def launcher_keeps_store() -> bool:
    """Whether the store of the process group is torchrun's rather than rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_setting(name: str) -> str:
    """A variable that a launcher has set, empty without it."""
    return os.environ.get(name, "")


def ranks_per_host(world_size: int) -> int:
    """Ranks that the launcher started on this host; 1 if it is the only host, where each process fails by itself."""
    settings = launch_settings() or {}
    count = settings.get("processes_per_node") or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 1 if count >= world_size else count


def launch_settings() -> dict[str, Any] | None:
    """
    What `hf-mmparallel launch` tells this worker: `id`, `node`, `host` and `port` of the store, `prefix` of the keys,
    `folder` for signs of life, `since` when the job was started first; in a process that joins a running job also
    `first_id` of its launcher's processes, and `num_processes` and `processes_per_node` that the job started with.
    `None` under other launchers.
    """
    if LAUNCH_SETTINGS not in os.environ:
        return None
    told = json.loads(os.environ[LAUNCH_SETTINGS])
    if "first_id" in told:  # it has a process group of its own until it joins
        return told | {"id": told["first_id"] + int(os.environ["LOCAL_RANK"])}
    own = {"id": int(os.environ["RANK"]), "host": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"])}
    return told | own


def restarted_since() -> float | None:
    """When the launcher started this job first, in seconds since the epoch, if it has started it again since."""
    settings = launch_settings()
    is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return settings["since"] if settings is not None and is_again else None


def tell_deepspeed_of_cpu() -> None:
    """Tells DeepSpeed, where it is installed, that there is no accelerator: it would look for one and warn."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def joins_job() -> bool:
    """Whether this process was started to join a job that runs already."""
    return "first_id" in (launch_settings() or {})


def outlive_nccl_errors() -> None:
    """Keeps torch from ending this process when a peer of an NCCL group that is made from now on is lost."""
    # 0 is "no handling". By torchrun's 1 the watchdog of a group ends the process; by 2 it aborts communicators before
    # this process knows of a loss, so that sums would be wrong without an error.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def set_launch_settings(settings: dict[str, Any]) -> None:
    """Sets what the workers that this process starts are told."""
    os.environ[LAUNCH_SETTINGS] = json.dumps(settings)
    # Unless a level was chosen, workers don't print torch's warnings about connections, each with a stack of 20 lines:
    # when processes are lost, connections end in all others.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


_LAUNCHERS = ("ACCELERATE_", "CUDA_", "FSDP_", "NCCL_", "OMP_", "PYTORCH_", "SLURM_", "TORCH_", "TRITON_")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launcher_variables() -> dict[str, str]:
    """The variables by which launchers and libraries are set, for a bug report."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_LAUNCHERS) or name in _RANKS}
