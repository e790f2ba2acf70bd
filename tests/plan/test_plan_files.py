"""Plans and plugins as text: what is written is read back, and every form that `parallel=` takes means the same."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import find_arrangement
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    layout_data,
    plan_for_model,
    resolve_plan,
    save_layout,
)
from hf_mmparallel.plan.methods import ARRANGEMENTS
from tests.plan.specs import model_spec, specs_and_plans

SPEC = model_spec()
PLUGIN = MultimodalParallelPlugin(
    {
        "vision": ModulePlugin(dp_size=2, freeze="tower", activation_checkpointing="selective"),
        LANGUAGE_MODEL: ModulePlugin(tp_size=2, layers_per_stage=[1, 3], activation_checkpointing=True),
    }
)
DICT = {
    "vision": {"dp_size": 2, "freeze": "tower", "activation_checkpointing": "selective"},
    LANGUAGE_MODEL: {"pp_size": 2, "tp_size": 2, "layers_per_stage": [1, 3], "activation_checkpointing": True},
}
PLAN = resolve_plan(SPEC, PLUGIN.modules, num_microbatches=3, schedule="gpipe")
TWO_COPIES = resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(dp_size=2)})


def with_plan(modules, plan=PLAN) -> dict:
    """A file with a plan and settings of modules beside it."""
    return {"plan": plan.to_dict(), "modules": modules}


def read(plan, modules=None) -> MultimodalParallelPlugin:
    return MultimodalParallelPlugin.from_any(with_plan(modules or {}, plan))


def frozen(plugin):
    """The model as the settings of a plugin freeze it."""
    modules = {
        name: m.with_frozen(plugin.modules.get(name, ModulePlugin()).freeze) for name, m in SPEC.modules.items()
    }
    return dataclasses.replace(SPEC, modules=modules)


def planned(plugin) -> ParallelPlan:
    return plan_for_model(plugin, frozen(plugin), None)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@settings(max_examples=40)
@given(specs_and_plans())
def test_a_plan_survives_json_and_yaml(case):
    _, plan = case
    for text in (plan.to_json(), yaml.safe_dump(plan.to_dict(), sort_keys=False)):
        back = ParallelPlan.from_dict(yaml.safe_load(text))
        assert back == plan
        assert list(back.modules) == list(plan.modules)
        assert back.fingerprint == plan.fingerprint


def test_optional_keys_of_a_plan_have_defaults():
    data = {"modules": {LANGUAGE_MODEL: {"replicas": [[{"layers": [0, 4], "ranks": [[0]]}]]}}}
    alone = dataclasses.replace(SPEC, modules={LANGUAGE_MODEL: SPEC.language_model})
    assert ParallelPlan.from_dict(data) == resolve_plan(alone, {})
    assert "microbatch_assignment" not in PLAN.to_dict()


def test_the_microbatches_of_each_replica_are_part_of_a_plan():
    data = {**TWO_COPIES.to_dict(), "replica_microbatches": [5, 2]}
    del data["num_microbatches"]
    back = ParallelPlan.from_dict(data)
    assert back == dataclasses.replace(TWO_COPIES, replica_microbatches=(5, 2))
    assert back == ParallelPlan.from_dict(back.to_dict())
    assert (back.num_microbatches, back.microbatch_counts, back.total_microbatches) == (4, (5, 2), 7)
    assert "replica_microbatches" not in TWO_COPIES.to_dict() and TWO_COPIES.microbatch_counts == (1, 1)
    served = [list(back.served_replicas(*place)) for place in (("vision", 0), (LANGUAGE_MODEL, 1))]
    assert served == [[0, 1], [1]]


def test_the_fingerprint_sees_every_field():
    module, stage = PLAN.modules[LANGUAGE_MODEL], PLAN.stage(LANGUAGE_MODEL, 0, 1)
    changes = ({"trainable": False}, {"mesh": ((5, 4),)}, {"layers": (2, 4)})
    stages = [dataclasses.replace(stage, **change) for change in changes]
    modules = [dataclasses.replace(module, replicas=((module.replicas[0][0], changed),)) for changed in stages]
    modules.append(dataclasses.replace(module, activation_checkpointing=False))
    plans = [{"modules": {**PLAN.modules, LANGUAGE_MODEL: changed}} for changed in modules]
    plans += [{"edges": ()}, {"schedule": "1f1b"}, {"num_microbatches": 4}, {"replica_microbatches": (3,)}]
    others = [dataclasses.replace(PLAN, **change) for change in plans]
    assert len({plan.fingerprint for plan in [PLAN, *others]}) == 1 + len(others)


def test_the_fingerprint_is_the_same_in_every_process(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert json.loads(path.read_text()) == json.loads(PLAN.to_json())
    code = f"from hf_mmparallel.plan import ParallelPlan; print(ParallelPlan.load({str(path)!r}).fingerprint)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PLAN.fingerprint


FORMS = {
    "plugin": lambda folder: PLUGIN,
    "modules": lambda folder: PLUGIN.modules,
    "dict": lambda folder: DICT,
    "mixed": lambda folder: {**DICT, "vision": PLUGIN.modules["vision"]},
    "whole dict": lambda folder: {"modules": DICT, "schedule": "1f1b"},
    "whole json": lambda folder: " " + json.dumps(PLUGIN.to_dict()),
    "json file": lambda folder: written(folder / "a.json", json.dumps(DICT)),
    "name of a file": lambda folder: str(written(folder / "b.yaml", yaml.safe_dump({"modules": DICT}))),
}
PLAN_FORMS = {
    "plan": lambda folder: PLAN,
    "json": lambda folder: PLAN.to_json(),
    "plugin": lambda folder: MultimodalParallelPlugin(plan=PLAN, schedule="gpipe", num_microbatches=3).to_dict(),
    "json file": lambda folder: PLAN.save(folder / "plan.json") or folder / "plan.json",
    "yaml file": lambda folder: PLAN.save(folder / "plan.yaml") or folder / "plan.yaml",
    "yml file": lambda folder: PLAN.save(folder / "plan.yml") or folder / "plan.yml",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_plugin(form, tmp_path):
    assert MultimodalParallelPlugin.from_any(FORMS[form](tmp_path)) == PLUGIN


@pytest.mark.parametrize("form", PLAN_FORMS)
def test_every_form_of_a_plan(form, tmp_path):
    plugin = MultimodalParallelPlugin.from_any(PLAN_FORMS[form](tmp_path))
    assert plugin.plan == PLAN
    assert (plugin.schedule, plugin.num_microbatches, plugin.modules) == ("gpipe", 3, {})


def test_modules_of_a_file(tmp_path):
    path = written(tmp_path / "a.yaml", "vision:\n  dp_size: 2\nlanguage_model:\n")
    assert MultimodalParallelPlugin.from_any(path).modules[LANGUAGE_MODEL] == ModulePlugin()
    plugin = read(PLAN, {"vision": {"freeze": True}})
    assert plugin.plan == PLAN and plugin.modules == {"vision": ModulePlugin(freeze=True)}
    assert MultimodalParallelPlugin.from_any(plugin.to_dict()) == plugin
    # Only what differs is written.
    assert ModulePlugin().to_dict() == {} and PLUGIN.to_dict() == {"modules": DICT, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "`parallel=3` must be a dict"),
        ("missing.yaml", "'missing.yaml'` is neither a file nor"),
        ({"modules": DICT, "shedule": "gpipe"}, "no `shedule`. Did you mean `schedule`"),
        ({"modules": DICT, "schedule": "gipe"}, "no `gipe`. Did you mean `gpipe`"),
        ({"vision": {"tp": 2}}, "no `tp`. Did you mean `tp_size`"),
        ({"vision": 2}, "`vision=2` must be a `ModulePlugin` or a dict of its settings.$"),
        ({"vision": {}, "bogus": 1, LANGUAGE_MODEL: {}}, "`bogus=1` .* Known: `vision`, `language_model`.$"),
        ({"vision": {}, "schedule": "gpipe"}, "`schedule='gpipe'` stands among the modules"),
        (with_plan({"vision": {"dp_size": 3}}), "`dp_size=3` of `vision` contradicts the plan beside it, which has 2"),
        (with_plan({LANGUAGE_MODEL: {"tp_size": 1}}), "`tp_size=1` of `language_model` contradicts"),
        (with_plan({LANGUAGE_MODEL: {"activation_checkpointing": False}}), "checkpointing=False` .* contradicts"),
        (
            with_plan({"vision": {"colocate_with": LANGUAGE_MODEL}}),
            "`colocate_with='language_model'` .* has no effect",
        ),
        (with_plan({"visoin": {"freeze": True}}), "no `visoin`. Did you mean `vision`"),
    ],
)
def test_what_is_no_plugin_is_a_sentence(value, message):
    with pytest.raises(ValueError, match=message):
        MultimodalParallelPlugin.from_any(value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_size": 0}, "`dp_size=0` must be a whole number of at least 1"),
        ({"tp_size": 2.0}, "`tp_size=2.0`"),
        ({"pp_size": True}, "`pp_size=True`"),
        ({"cp_size": 0}, "`cp_size=0`"),
        ({"activation_checkpointing": 1}, "is `1`; it must be `true`, `false` or `selective`"),
        ({"activation_checkpointing": "selective", "cp_size": 2}, "can't be used with `cp_size=2`: attention over"),
        ({"activation_checkpointing": "selective", "offload_activations": True}, "with `offload_activations=True`"),
        ({"cp_size": 2, "cp_method": "ltp"}, "no `ltp`. Did you mean `lpt`"),
        ({"cp_size": 2, "cp_mode": "rows"}, "no `rows`. Did you mean `row`"),
        ({"float8": "row"}, "no `row`. Did you mean `rowwise`"),
        ({"float8": True}, "`float8`"),
        ({"float8": "rowwise", "split_backward": True}, "`split_backward=True` can't be used with `float8"),
        ({"cp_size": 2, "cp_block": 0}, "`cp_block=0`"),
        ({"cp_size": 2, "cp_method": "zigzag", "cp_mode": "segments"}, "`cp_method='zigzag'` assigns blocks"),
        ({"cp_method": "zigzag"}, "method='zigzag'.* has no effect with `cp_size=1`"),
        ({"zero_stage": 4}, "`zero_stage=4`"),
        ({"shard_size": 2}, "`shard_size=2` has no effect with `zero_stage=0`"),
        ({"zero_stage": 2, "reshard_after_forward": False}, "`reshard_after_forward=False` has no effect"),
        ({"zero_stage": 3, "offload_params": True}, "`zero_stage=3` .* `offload_params=True`"),
        ({"zero_stage": 1, "shard_size": 0}, "`shard_size` is `0`"),
        ({"pp_size": 3, "layers_per_stage": [2, 2]}, r"`layers_per_stage=\[2, 2\]` must .* `pp_size=3`"),
        ({"layers_per_stage": [4, 0]}, r"`layers_per_stage=\[4, 0\]` must have one number of at least 1"),
        ({"layers_per_stage": []}, r"`layers_per_stage=\[\]` must have one number of at least 1"),
    ],
)
def test_settings_that_can_not_be_are_a_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        ModulePlugin(**settings)


@pytest.mark.parametrize("beside", [{}, {"vision": {"freeze": True}}])
def test_the_order_of_modules_in_a_file_does_not_matter(beside, tmp_path):
    """`yaml.safe_dump` sorts keys: `audio`, `language_model`, `vision`."""
    modules = {name: ModulePlugin.from_dict(own) for name, own in beside.items()}
    plan = resolve_plan(SPEC, modules, num_microbatches=3)
    path = written(tmp_path / "plan.yaml", yaml.safe_dump(layout_data(plan, modules)))
    assert path.read_text().index("language_model:") < path.read_text().index("vision:", 60)
    sorted_keys = MultimodalParallelPlugin.from_any(path)
    assert list(sorted_keys.plan.modules) == list(SPEC.modules)
    data = {key: value for key, value in plan.to_dict().items() if key != "edges"}
    data["modules"] = dict(reversed(data["modules"].items()))
    without_edges = MultimodalParallelPlugin.from_any({"plan": data, "modules": beside})
    assert planned(sorted_keys).fingerprint == planned(without_edges).fingerprint == plan.fingerprint


@pytest.mark.parametrize("freeze", [True, "tower", ["embeddings"], False])
def test_what_a_run_freezes_is_frozen_by_its_file(freeze, tmp_path):
    asked = MultimodalParallelPlugin({"vision": ModulePlugin(freeze=freeze), LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    path = tmp_path / "plan.json"
    save_layout(path, planned(asked), asked.modules)
    again = MultimodalParallelPlugin.from_any(path)
    assert frozen(again) == frozen(asked)
    assert planned(again) == planned(asked) == ParallelPlan.load(path)


@pytest.mark.parametrize("beside", [{}, {"freeze": False}, {"freeze": "tower"}])
def test_a_plan_does_not_train_what_a_run_had_frozen(beside):
    plan = resolve_plan(SPEC, {"vision": ModulePlugin(freeze=True)})
    with pytest.raises(ValueError, match=r"`vision` replica 0 trains nothing .* (576|128) of its parameters"):
        planned(read(plan, {"vision": beside}))


def test_a_plan_alone_does_not_train_what_a_run_had_frozen_in_part():
    asked = MultimodalParallelPlugin({"vision": ModulePlugin(freeze="tower")})
    plan = planned(asked)
    assert plan.to_dict()["modules"]["vision"]["replicas"][0][0]["trainable"] == "partly"
    with pytest.raises(ValueError, match="stage 0 of `vision` replica 0 is partly frozen .* `freeze`"):
        planned(read(plan))
    assert plan_for_model(read(plan), frozen(asked), None) == plan  # of a model that the user has frozen
    for freeze, partly in (("tower", True), (False, False)):
        again = planned(read(plan, {"vision": {"freeze": freeze}}))
        assert again.modules["vision"].replicas[0][0].partly_frozen == partly


def test_settings_that_agree_with_the_plan_beside_them_hold():
    plugin = read(PLAN, {"vision": DICT["vision"], LANGUAGE_MODEL: {"layers_per_stage": [1, 3], "tp_size": 2}})
    assert layout_data(PLAN, plugin.modules)["modules"] == {"vision": {"freeze": "tower"}}


MANY_COPIES = resolve_plan(
    SPEC, {"vision": ModulePlugin(dp_size=4), LANGUAGE_MODEL: ModulePlugin(dp_size=4, pp_size=2)}
)


def test_copies_are_written_once_and_read_back(tmp_path):
    """Where ranks are at equal distances; others are written as they are."""
    once = MANY_COPIES.to_dict()["modules"][LANGUAGE_MODEL]["replicas"]
    assert [(own["copies"], own["ranks_apart"], len(own["stages"])) for own in once] == [(4, 2, 2)]
    vision = MANY_COPIES.modules["vision"]
    mixed = dataclasses.replace(vision, replicas=(vision.replicas[3], *vision.replicas[:3]))
    plan = dataclasses.replace(MANY_COPIES, modules={**MANY_COPIES.modules, "vision": mixed})
    assert [isinstance(own, dict) for own in plan.to_dict()["modules"]["vision"]["replicas"]] == [False, True]
    for own in (MANY_COPIES, plan):
        own.save(tmp_path / "plan.yaml")
        assert ParallelPlan.load(tmp_path / "plan.yaml") == own
    resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(dp_size=4096)}).save(tmp_path / "plan.yaml")
    assert len((tmp_path / "plan.yaml").read_text().splitlines()) < 40


MISTAKES = {
    "typo": (
        lambda data: data["modules"]["vision"].update(replica=data["modules"]["vision"].pop("replicas")),
        "Module `vision` of the plan has no `replica`. Did you mean `replicas`",
    ),
    "missing": (
        lambda data: data["modules"][LANGUAGE_MODEL]["replicas"][1][0].pop("ranks"),
        "Stage 0 of `language_model` replica 1 has no `ranks`",
    ),
    "typo at the top": (lambda data: data.update(shedule=data.pop("schedule")), "`shedule`. Did you mean `schedule`"),
    "edge": (lambda data: data["edges"][0].update(source="visoin"), "no `visoin`. Did you mean `vision`"),
    "setting": (lambda data: data["modules"]["vision"].update(freeze=True), "Module `vision` .* has no `freeze`"),
    "circle": (lambda data: data["edges"].append({"source": LANGUAGE_MODEL, "target": "vision"}), "form a cycle"),
    "number": (lambda data: data.update(replica_microbatches=3), "is `3`; it must be a list"),
    "none": (lambda data: data.update(replica_microbatches=[3, 0]), "`replica_microbatches` of the plan is `0`"),
    "mean": (
        lambda data: data.update(replica_microbatches=[3, 1], num_microbatches=3),
        r"`num_microbatches=3` .*\[3, 1\]`.* is 2",
    ),
    "singular": (lambda data: data.update(replica_microbatch=[3, 1]), "`replica_microbatches`"),
    "assignment": (lambda data: data.update(microbatch_assignment="taper"), "Did you mean `tapered`"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_plan_is_a_sentence(mistake):
    change, message = MISTAKES[mistake]
    data = {**TWO_COPIES.to_dict(), "num_microbatches": 2}
    change(data)
    with pytest.raises(ValueError, match=message):
        MultimodalParallelPlugin.from_any(data)


def places(data, path=()):
    """The ways to every value of nested data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


VALUES = [None, True, "x", -1, 0, 7, 2.5, [], [[]], {}, [None], {"x": 1}, [0, "x"], {1: 2}, "1f1b"]
# What `parallel=` takes, as it stands in files.
WHOLE = [
    PLAN.to_dict(),
    MANY_COPIES.to_dict(),
    layout_data(PLAN, PLUGIN.modules),
    PLUGIN.to_dict(),
    {**DICT, LANGUAGE_MODEL: {"cp_size": 2, "cp_method": "zigzag", "cp_block": 64, "attn_implementation": "bitfield"}},
    {"modules": {"vision": {"freeze": ["a", "projector"], "dp_size": 2}}, "auto": True, "schedule": "eager"},
]


@settings(max_examples=400)
@given(st.data())
def test_no_mistake_in_a_file_is_anything_but_a_sentence(data):
    """One value of a file is lost, renamed, or replaced by another; what still can be read is a plan of the model."""
    whole = json.loads(json.dumps(data.draw(st.sampled_from(WHOLE))))
    *way, last = data.draw(st.sampled_from(list(places(whole))))
    inner = whole
    for key in way:
        inner = inner[key]
    change = data.draw(st.sampled_from(["lose", "rename", "replace"]))
    if change == "replace":
        inner[last] = data.draw(st.sampled_from(VALUES))
    elif isinstance(inner, list):
        inner.pop(last)
    elif change == "lose":
        del inner[last]
    else:
        inner[str(last) + "s"] = inner.pop(last)
    try:
        plugin = MultimodalParallelPlugin.from_any(whole)
        if not plugin.auto:
            planned(plugin)
    except ValueError as error:
        assert len(str(error)) > 20


def test_arrangements_of_plan_files_have_the_names_of_their_functions():
    assert all(find_arrangement(name).__name__ == name for name in ARRANGEMENTS)
    with pytest.raises(ValueError, match="a plan file holds names only"):
        dataclasses.replace(PLAN, microbatch_assignment=find_arrangement("tapered")).to_dict()
