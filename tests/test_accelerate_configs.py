"""Launch files of `examples/accelerate_configs` say what their names do; `trainer/test_hosts_parity.py` runs two."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.run import get_args_parser

FOLDER = Path(__file__).parent.parent / "examples" / "accelerate_configs"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_file_and_its_name_counts_the_processes(path):
    config = load_config_from_file(str(path))
    hosts, processes, device = re.fullmatch(r"(one|two)_hosts?_(\d+)(cpu|gpu)", path.stem).groups()
    assert config.num_machines == {"one": 1, "two": 2}[hosts]
    assert config.num_processes == int(processes)
    assert config.use_cpu == (device == "cpu")


def test_the_slurm_script_is_valid_bash():
    subprocess.run([shutil.which("bash") or "bash", "-n", FOLDER / "slurm.sbatch"], check=True, timeout=20)


def test_files_for_clusters_start_torchrun_on_each_node():
    job = yaml.safe_load((FOLDER.parent / "clusters" / "pytorchjob.yaml").read_text())["spec"]
    pods = job["pytorchReplicaSpecs"]
    assert set(pods) == {"Master", "Worker"} and sum(pod["replicas"] for pod in pods.values()) == 2
    for pod in pods.values():
        (container,) = pod["template"]["spec"]["containers"]
        assert container["command"][0] == "torchrun"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["nprocPerNode"])
    task = yaml.safe_load((FOLDER.parent / "clusters" / "skypilot.yaml").read_text())
    set_by_sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    environment = {**task["envs"], **set_by_sky, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": os.environ["PATH"]}
    shell = f"torchrun() {{ printf '%s\\n' \"$@\"; }}\n{task['run']}"
    found = subprocess.run(["bash", "-euc", shell], env=environment, capture_output=True, text=True, check=True)
    given = get_args_parser().parse_args(found.stdout.split())
    assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", 1, "8")
    assert given.master_addr == "10.0.0.1" and given.training_script == "train.py"
