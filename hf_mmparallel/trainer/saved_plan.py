"""The plan in a checkpoint, and the settings of modules beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from accelerate.logging import get_logger

from ..plan import ModulePlugin, MultimodalParallelPlugin

logger = get_logger(__name__)

SAVED_PLAN = "parallel_plan.json"


def check_same_settings(saved: Mapping[str, ModulePlugin], given: Mapping[str, ModulePlugin]) -> None:
    """Raises `ValueError` if a saved run freezes or adapts a module in another way than this one."""
    plain = ModulePlugin()
    for name, before in saved.items():
        now = given.get(name, plain)
        for key in ("freeze", "peft_config"):
            old, new = (module.beside_plan.get(key, getattr(plain, key)) for module in (before, now))
            if old != new:
                raise ValueError(f"It has `{key}={old!r}` of `{name}`, and this run `{key}={new!r}`.")


def warn_of_other_settings(folder: str | Path, modules: Mapping[str, ModulePlugin]) -> None:
    """Warns if the run that wrote a checkpoint froze or adapted a module in another way than this one."""
    path = Path(folder) / SAVED_PLAN
    if not path.is_file():
        return
    try:
        check_same_settings(MultimodalParallelPlugin.from_any(path).modules, modules)
    except ValueError as error:
        logger.warning(f"The run that wrote `{path}` was another one: {str(error)[0].lower()}{str(error)[1:]}")
    except (OSError, yaml.YAMLError) as error:
        logger.warning(f"`{path}` can't be read, so that its settings are not compared: {error}")
