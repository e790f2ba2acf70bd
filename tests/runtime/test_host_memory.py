"""Limits of control groups in trees of files as Linux shows them."""

from pathlib import Path

import pytest

from hf_mmparallel.runtime import host_memory
from hf_mmparallel.runtime.host_memory import cgroup_available_bytes

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
DOCKER_MOUNT = V2_MOUNT.replace(" / /sys", " /docker/abc /sys")


def group(folder: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    """The files of a group of version 2."""
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": str(usage),
        f"{folder}memory.stat": f"anon 5\ninactive_file {cache}",
    }


def of_job(job: tuple, step: tuple) -> tuple[str, str, dict[str, str]]:
    files = group("job_1/", *job) | group("job_1/step_0/", *step) | group("job_2/", "10", 0)
    return "0::/job_1/step_0", V2_MOUNT, files


VERSION_1 = {
    "memory/job/memory.limit_in_bytes": "1000",
    "memory/job/memory.usage_in_bytes": "300",
    "memory/job/memory.stat": "cache 200\ninactive_file 1\ntotal_inactive_file 40",
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": "5000",
    "cpu/other/memory.limit_in_bytes": "1",
}
# the group of this process, what is mounted, files of groups; bytes that are left
TREES: dict[str, tuple[tuple[str, str, dict[str, str]], int | None]] = {
    "the step's limit": (of_job(("max", 500), ("1000", 300)), 700),
    "what others use of the same job": (of_job(("900", 800), ("1000", 300)), 100),
    "files that were read": (of_job(("900", 800, 50), ("1000", 300)), 150),
    "nothing left": (of_job(("900", 950), ("max", 300)), 0),
    "no limit": (of_job(("max", 500), ("max", 300)), None),
    "a container that sees its own group as the topmost": (("0::/", V2_MOUNT, group("", "1000", 300)), 700),
    "a container with the path of its host": (("0::/", DOCKER_MOUNT, group("", "1000", 300)), 700),
    "a group in such a container": (("0::/docker/abc/x", DOCKER_MOUNT, group("x/", "1000", 400)), 600),
    "version 1": (
        (
            "9:name=systemd:/job\n4:memory:/job\n1:cpu:/other\n0::/",
            "\n".join((V1_CPU_MOUNT, V1_MOUNT, V2_MOUNT.replace("cgroup rw,", "cgroup/unified rw,"))),
            VERSION_1,
        ),
        740,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_rest_along_the_path_counts(tmp_path: Path, name: str):
    (own, mounts, files), left = TREES[name]
    content = {"proc/self/cgroup": own, "proc/self/mountinfo": mounts}
    content |= {f"sys/fs/cgroup/{file}": text for file, text in files.items()}
    for file, text in content.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    assert cgroup_available_bytes(tmp_path) == left


def test_without_control_groups_the_memory_of_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert cgroup_available_bytes(tmp_path) is None
    assert host_memory.available_bytes() > 1 << 20
    for limit, available in ((1000, range(1000, 1001)), (None, range(1 << 20, 1 << 60))):
        monkeypatch.setattr(host_memory, "cgroup_available_bytes", lambda limit=limit: limit)
        assert host_memory.available_bytes() in available


def test_this_process_is_read():
    left = cgroup_available_bytes()
    assert left is None or left >= 0
    assert host_memory._own_groups(Path("/")) or not Path("/proc/self/cgroup").is_file()
