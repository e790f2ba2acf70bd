"""A run is repeated from the plan that it saved: the same parameters are trained, to the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_mmparallel.trainer import auto
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

LM = "language_model"
FROZEN = {"vision": {"freeze": True, "attn_implementation": "eager"}, LM: {"activation_checkpointing": True}}
ADAPTED = {"vision": {"freeze": "tower"}, LM: {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}}


def _train(parallel: Any, save: str | None = None) -> tuple[list[str], list[dict[str, float]]]:
    """What this rank trains, and the logs."""
    trainer = runs.make_trainer("llava", parallel, max_steps=2)
    trainer.train()
    if save is not None:
        trainer.save_model(save)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    return trained, runs.step_logs(trainer)


def _repeat(layout: dict[str, Any], folder: str) -> dict[str, Any]:
    """A run, and runs from its file and from the file with sorted keys."""
    found = {"first": _train(layout, folder)}
    path = Path(folder) / "parallel_plan.json"
    found["file"] = _train(str(path))
    found["sorted"] = _train(yaml.safe_dump(json.loads(path.read_text()), default_flow_style=True, width=1e9))
    if layout == FROZEN:
        found["thawed"] = _resumed({"vision": {}, LM: layout[LM]}, folder)
    return found


def _resumed(parallel: Any, folder: str) -> str:
    """What is said when a run goes on that trains more than before."""
    said = []
    auto.logger.warning = lambda text, **_: said.append(text)
    trainer = runs.make_trainer("llava", parallel, max_steps=2)
    trainer.state.save_to_json(str(Path(folder) / "trainer_state.json"))  # as in a checkpoint
    trainer._load_from_checkpoint(folder)
    return " ".join(said)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [FROZEN, deep(ADAPTED)], ids=["frozen", "adapters"])
def test_a_run_is_repeated_from_its_plan(layout: dict[str, Any], tmp_path: Path):
    tiny.FAMILIES["llava"]()  # imported before ranks are forked
    ranks = run_distributed(_repeat, 2, layout, str(tmp_path / "saved"), timeout=100)
    for number, found in enumerate(ranks):
        trained, logs = found.pop("first")
        if "thawed" in found:
            thawed = found.pop("thawed")
            assert "`freeze=True` of `vision`" in thawed and "`freeze=False`" in thawed
        assert len(logs) == 2 and all(row["loss"] > 0 for row in logs)
        assert any("lora" in name or "lm_head" in name for name in trained) == (number == 1)
        for form, (names, again) in found.items():
            assert names == trained, form
            assert again == logs, form
    saved = json.loads((tmp_path / "saved" / "parallel_plan.json").read_text())
    assert saved["modules"]["vision"]["freeze"] == layout["vision"]["freeze"]
