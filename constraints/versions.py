"""
Versions for `make`: `python constraints/versions.py freeze | bounds | names | newer`.

`freeze` prints what this environment has installed, with the Triton that torch for CUDA requires, and `bounds` the
lower bounds of setup.cfg, both as constraints. `names` prints the requirements of setup.cfg without versions, `newer`
those with a newer release than the tested one.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
TRITON = {"2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}
"""
Release of torch -> what its CUDA build requires; a new release needs a row. The CPU build requires none, and pip would
take any.
"""
OWN = ("hf_mmparallel", "pip", "setuptools")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> dict[str, str]:
    """Name of each requirement of setup.cfg, extras included -> its lower or only version."""
    setup = configparser.ConfigParser()
    setup.read(FOLDER.parent / "setup.cfg")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    found = re.findall(r"^([\w.-]+)(?:\[\w+\])?(?:>=|==)([\w.]+)", "\n".join(texts), re.MULTILINE)
    return {normalized(name): version for name, version in sorted(found)}


def installed() -> dict[str, str]:
    """Distribution -> version, without the part that names a build; of Triton that in the table."""
    rows = (
        (normalized(one.metadata["Name"]), one.version.split("+")[0]) for one in importlib.metadata.distributions()
    )
    found = {name: version for name, version in sorted(rows) if name not in map(normalized, OWN)}
    return found | {"triton": TRITON[".".join(found["torch"].split(".")[:2])]}


def tested() -> dict[str, str]:
    """The constraints of the tested set."""
    lines = (FOLDER / "tested.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def latest(name: str) -> str | None:
    """The newest release of a distribution; `None` if the index can't be asked."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"\(([^)]+)\)", said)
    return found[1].split("+")[0] if found else None


def newer() -> list[str]:
    """A line for each requirement that has another newest release than the tested one."""
    pins = tested()
    names = [name for name in requirements() if name in pins]
    with ThreadPoolExecutor(8) as pool:
        releases = dict(zip(names, pool.map(latest, names), strict=True))
    lines = [
        f"{name}: {pins[name]} is tested, {release} exists"
        for name, release in releases.items()
        if release not in (None, pins[name])
    ]
    if None in releases.values():
        lines.append(f"not found: {', '.join(name for name, release in releases.items() if release is None)}")
    return lines


def main(command: str) -> None:
    if command == "newer":
        print("\n".join(newer()) or "all tested versions are the newest ones")
    elif command == "names":
        print(" ".join(requirements()))
    else:
        rows = {"freeze": installed, "bounds": requirements}[command]()
        print("\n".join(f"{name}=={version}" for name, version in rows.items()))


if __name__ == "__main__":
    main(sys.argv[1])
