"""Launch files of `examples/accelerate_configs` say what their names do; `trainer/test_hosts_parity.py` runs two."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

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
