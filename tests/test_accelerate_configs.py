"""The launch files of `examples/accelerate_configs` start what they say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FOLDER = Path(__file__).parent.parent / "examples" / "accelerate_configs"

_SCRIPT = """
import torch.distributed as dist
from transformers import TrainingArguments

args = TrainingArguments(output_dir="unused")
print(f"rank {args.process_index} of {args.world_size} on {args.device}\\n", end="", flush=True)
dist.destroy_process_group()  # a rank that exits with an open gloo group may abort
"""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_file_and_its_name_counts_the_processes(path):
    config = load_config_from_file(str(path))
    hosts, processes, device = re.fullmatch(r"(one|two)_hosts?_(\d+)(cpu|gpu)", path.stem).groups()
    assert config.num_machines == {"one": 1, "two": 2}[hosts]
    assert config.num_processes == int(processes)
    assert config.use_cpu == (device == "cpu")


@pytest.mark.distributed
def test_four_cpu_processes_start(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", FOLDER / "one_host_4cpu.yaml"]
    done = subprocess.run([*launch, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = sorted(re.findall(r"rank \d of \d on \w+", done.stdout))
    assert found == [f"rank {rank} of 4 on cpu" for rank in range(4)]


def test_the_slurm_script_is_valid_bash():
    subprocess.run([shutil.which("bash") or "bash", "-n", FOLDER / "slurm.sbatch"], check=True, timeout=20)
