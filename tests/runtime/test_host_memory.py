"""Limits of control groups in trees of files as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_mmparallel.runtime import host_memory
from hf_mmparallel.runtime.host_memory import cgroup_available_bytes

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"


def tree(root: Path, own: str, mounts: str, files: dict[str, str]) -> Path:
    """A file system with the groups of a process, what is mounted, and files of groups."""
    content = {"proc/self/cgroup": own, "proc/self/mountinfo": mounts}
    content |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def group(folder: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    """The files of a group of version 2."""
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": str(usage),
        f"{folder}memory.stat": f"anon 5\ninactive_file {cache}",
    }


@pytest.mark.parametrize(
    ("job", "step", "left"),
    [
        (("max", 500, 0), ("1000", 300, 0), 700),
        (("900", 800, 0), ("1000", 300, 0), 100),  # what others use of the same job
        (("900", 800, 50), ("1000", 300, 0), 150),  # files that were read
        (("900", 950, 0), ("max", 300, 0), 0),
        (("max", 500, 0), ("max", 300, 0), None),
    ],
)
def test_the_smallest_rest_along_the_path_counts(tmp_path: Path, job: tuple, step: tuple, left: int | None):
    files = group("job_1/", *job) | group("job_1/step_0/", *step) | group("job_2/", "10", 0)
    assert cgroup_available_bytes(tree(tmp_path, "0::/job_1/step_0", V2_MOUNT, files)) == left


def test_a_container_sees_its_own_group_as_the_topmost(tmp_path: Path):
    assert cgroup_available_bytes(tree(tmp_path, "0::/", V2_MOUNT, group("", "1000", 300))) == 700


def test_a_container_with_the_path_of_its_host_has_the_limit_of_its_mount(tmp_path: Path):
    mount = V2_MOUNT.replace(" / /sys", " /docker/abc /sys")
    assert cgroup_available_bytes(tree(tmp_path, "0::/", mount, group("", "1000", 300))) == 700
    mounted = cgroup_available_bytes(tree(tmp_path, "0::/docker/abc/x", mount, group("x/", "1000", 400)))
    assert mounted == 600


def test_limits_of_version_1(tmp_path: Path):
    files = {
        "memory/job/memory.limit_in_bytes": "1000",
        "memory/job/memory.usage_in_bytes": "300",
        "memory/job/memory.stat": "cache 200\ninactive_file 1\ntotal_inactive_file 40",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "5000",
        "cpu/other/memory.limit_in_bytes": "1",
    }
    own = "9:name=systemd:/job\n4:memory:/job\n1:cpu:/other\n0::/"
    mounts = "\n".join((V1_CPU_MOUNT, V1_MOUNT, V2_MOUNT.replace("cgroup rw,", "cgroup/unified rw,")))
    assert cgroup_available_bytes(tree(tmp_path, own, mounts, files)) == 740


def test_without_control_groups_the_memory_of_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert cgroup_available_bytes(tmp_path) is None
    machine = host_memory.available_bytes()
    assert machine > 1 << 20
    monkeypatch.setattr(host_memory, "cgroup_available_bytes", lambda: 1000)
    assert host_memory.available_bytes() == 1000
    monkeypatch.setattr(host_memory, "cgroup_available_bytes", lambda: None)
    assert host_memory.available_bytes() > 1 << 20


def test_this_process_is_read():
    left = cgroup_available_bytes()
    assert left is None or left >= 0
    assert host_memory._own_groups(Path("/")) or not Path("/proc/self/cgroup").is_file()
