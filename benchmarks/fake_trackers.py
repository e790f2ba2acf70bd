"""
Stand-ins for the libraries of experiment trackers, which transformers' own callbacks talk to.

Each has one run in the process that has begun it, and raises for a log without one, as the real ones do. What is
logged is written to `tracked-<member>.jsonl`.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

NAMES = ("wandb", "trackio", "clearml")


class Anything:
    """Takes any call, attribute or item, and does nothing."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Tracked:
    """The run of a tracker in this process, if it has begun one."""

    def __init__(self, tracker: str, path: Path):
        self.tracker, self.path, self.has_begun = tracker, path, False

    def begin(self) -> None:
        self.has_begun = True

    def log(self, row: dict[str, Any]) -> None:
        if not self.has_begun:
            raise RuntimeError(f"{self.tracker}.init() must be called before {self.tracker}.log()")
        with self.path.open("a") as file:
            file.write(json.dumps({"tracker": self.tracker, **row}) + "\n")


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def install(path: Path) -> None:
    """Makes `report_to=NAMES` use the stand-ins in this process, which write to a file."""
    runs = {name: Tracked(name, path) for name in NAMES}

    def begin_wandb(**kwargs: Any) -> None:
        runs["wandb"].begin()
        wandb.run = Anything()  # type: ignore[attr-defined]

    wandb = _module("wandb", run=None, init=begin_wandb, log=runs["wandb"].log, config=Anything(), termwarn=Anything())
    for name in ("wandb.sdk", "wandb.sdk.lib"):
        _module(name)
    _module("wandb.sdk.lib.config_util", ConfigError=ValueError)

    context = types.SimpleNamespace(current_space_id=types.SimpleNamespace(get=lambda: None))
    _module(
        "trackio",
        init=lambda **kwargs: runs["trackio"].begin(),
        log=runs["trackio"].log,
        config=Anything(),
        context_vars=context,
        finish=Anything(),
    )

    class Logger(Anything):
        def report_scalar(self, title: str, series: str, value: float, iteration: int) -> None:
            kind = title.partition("_")[0]  # its callback counts what it takes for runs
            runs["clearml"].log({f"{kind}/{series}": value, "train/global_step": iteration})

    class Task(Anything):
        @staticmethod
        def init(**kwargs: Any) -> Task:
            runs["clearml"].begin()
            return Task()

        @staticmethod
        def running_locally() -> bool:
            return True

        @staticmethod
        def current_task() -> None:
            return None

        def get_logger(self) -> Logger:
            return Logger()

    proxies = types.SimpleNamespace(flatten_dictionary=lambda values: {})
    utilities = types.SimpleNamespace(proxy_object=proxies)
    _module("clearml", Task=Task, utilities=utilities, OutputModel=lambda **kwargs: Anything())


def tracked(folder: Path) -> dict[str, dict[int, list[int]]]:
    """Tracker -> member -> the steps whose loss it logged."""
    found: dict[str, dict[int, list[int]]] = {name: {} for name in NAMES}
    for path in sorted(folder.glob("tracked-*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if "train/loss" in row:
                steps = found[row["tracker"]].setdefault(int(path.stem.partition("-")[2]), [])
                steps.append(row["train/global_step"])
    return found
