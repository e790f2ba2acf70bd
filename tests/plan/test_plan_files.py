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

PLUGIN = MultimodalParallelPlugin(
    {
        "vision": ModulePlugin(dp_size=2, freeze="tower"),
        LANGUAGE_MODEL: ModulePlugin(tp_size=2, layers_per_stage=[1, 3], activation_checkpointing=True),
    }
)
DICT = {
    "vision": {"dp_size": 2, "freeze": "tower"},
    LANGUAGE_MODEL: {"pp_size": 2, "tp_size": 2, "layers_per_stage": [1, 3], "activation_checkpointing": True},
}
PLAN = resolve_plan(model_spec(), PLUGIN.modules, num_microbatches=3, schedule="gpipe")


@settings(max_examples=40)
@given(specs_and_plans())
def test_a_plan_survives_json_and_yaml(case):
    _, plan = case
    for text in (plan.to_json(), yaml.safe_dump(plan.to_dict(), sort_keys=False)):
        back = ParallelPlan.from_dict(yaml.safe_load(text))
        assert back == plan
        assert list(back.modules) == list(plan.modules)
        assert back.fingerprint == plan.fingerprint


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_a_plan_survives_a_file(name, tmp_path):
    PLAN.save(tmp_path / name)
    assert ParallelPlan.load(tmp_path / name) == PLAN
    if name.endswith("json"):
        json.loads((tmp_path / name).read_text())


def test_optional_keys_of_a_plan_have_defaults():
    data = {"modules": {LANGUAGE_MODEL: {"replicas": [[{"layers": [0, 4], "ranks": [[0]]}]]}}}
    plan = ParallelPlan.from_dict(data)
    assert plan == resolve_plan(
        dataclasses.replace(model_spec(), modules={LANGUAGE_MODEL: model_spec().language_model}), {}
    )


def test_the_microbatches_of_each_replica_are_part_of_a_plan():
    plan = resolve_plan(model_spec(), {LANGUAGE_MODEL: ModulePlugin(dp_size=2)})
    data = {**plan.to_dict(), "replica_microbatches": [5, 2]}
    del data["num_microbatches"]
    back = ParallelPlan.from_dict(data)
    assert back == dataclasses.replace(plan, replica_microbatches=(5, 2)) == ParallelPlan.from_dict(back.to_dict())
    assert (back.num_microbatches, back.microbatch_counts, back.total_microbatches) == (4, (5, 2), 7)
    assert "replica_microbatches" not in plan.to_dict() and plan.microbatch_counts == (1, 1)
    assert [list(back.served_replicas("vision", 0)), list(back.served_replicas(LANGUAGE_MODEL, 1))] == [[0, 1], [1]]


@pytest.mark.parametrize(
    ("given_counts", "message"),
    [
        ({"replica_microbatches": 3}, "`replica_microbatches` of the plan is `3`; it must be a list"),
        (
            {"replica_microbatches": [3, 0]},
            "A number in `replica_microbatches` of the plan is `0`; it must be a whole",
        ),
        (
            {"replica_microbatches": [3, 1], "num_microbatches": 3},
            r"`num_microbatches=3` contradicts .*\[3, 1\]`.* is 2",
        ),
        ({"replica_microbatch": [3, 1]}, "`replica_microbatches`"),
    ],
)
def test_wrong_microbatches_of_replicas_are_refused(given_counts, message):
    plan = resolve_plan(model_spec(), {LANGUAGE_MODEL: ModulePlugin(dp_size=2)})
    with pytest.raises(ValueError, match=message):
        ParallelPlan.from_dict({**plan.to_dict(), "num_microbatches": 2, **given_counts})


def test_the_fingerprint_sees_every_field():
    stage = PLAN.stage(LANGUAGE_MODEL, 0, 1)
    module = PLAN.modules[LANGUAGE_MODEL]
    stages = [
        dataclasses.replace(stage, trainable=False),
        dataclasses.replace(stage, mesh=((5, 4),)),
        dataclasses.replace(stage, layers=(2, 4)),
    ]
    modules = [dataclasses.replace(module, replicas=((module.replicas[0][0], changed),)) for changed in stages]
    modules.append(dataclasses.replace(module, activation_checkpointing=False))
    others = [dataclasses.replace(PLAN, modules={**PLAN.modules, LANGUAGE_MODEL: changed}) for changed in modules]
    others.append(dataclasses.replace(PLAN, edges=()))
    others.append(dataclasses.replace(PLAN, schedule="1f1b"))
    others.append(dataclasses.replace(PLAN, num_microbatches=4))
    others.append(dataclasses.replace(PLAN, replica_microbatches=(3,)))
    assert len({plan.fingerprint for plan in [PLAN, *others]}) == 1 + len(others)


def test_the_fingerprint_is_the_same_in_every_process():
    code = "from tests.plan.test_plan_files import PLAN; print(PLAN.fingerprint)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PLAN.fingerprint


FORMS = {
    "plugin": lambda folder: PLUGIN,
    "modules": lambda folder: PLUGIN.modules,
    "dict": lambda folder: DICT,
    "mixed": lambda folder: {**DICT, "vision": PLUGIN.modules["vision"]},
    "whole dict": lambda folder: {"modules": DICT, "schedule": "1f1b"},
    "to_dict": lambda folder: PLUGIN.to_dict(),
    "json": lambda folder: json.dumps(DICT),
    "whole json": lambda folder: " " + json.dumps(PLUGIN.to_dict()),
    "json file": lambda folder: _written(folder / "a.json", json.dumps(DICT)),
    "yaml file": lambda folder: _written(folder / "a.yaml", yaml.safe_dump(DICT)),
    "name of a file": lambda folder: str(_written(folder / "b.yaml", yaml.safe_dump({"modules": DICT}))),
}


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_plugin(form, tmp_path):
    assert MultimodalParallelPlugin.from_any(FORMS[form](tmp_path)) == PLUGIN


def test_a_module_without_settings_has_the_defaults(tmp_path):
    path = _written(tmp_path / "a.yaml", "vision:\n  dp_size: 2\nlanguage_model:\n")
    assert MultimodalParallelPlugin.from_any(path).modules[LANGUAGE_MODEL] == ModulePlugin()


PLAN_FORMS = {
    "plan": lambda folder: PLAN,
    "dict": lambda folder: PLAN.to_dict(),
    "json": lambda folder: PLAN.to_json(),
    "plugin's dict": lambda folder: MultimodalParallelPlugin(
        plan=PLAN, schedule="gpipe", num_microbatches=3
    ).to_dict(),
    "file": lambda folder: PLAN.save(folder / "plan.yaml") or folder / "plan.yaml",
}


@pytest.mark.parametrize("form", PLAN_FORMS)
def test_every_form_of_a_plan(form, tmp_path):
    plugin = MultimodalParallelPlugin.from_any(PLAN_FORMS[form](tmp_path))
    assert plugin.plan == PLAN
    assert (plugin.schedule, plugin.num_microbatches, plugin.modules) == ("gpipe", 3, {})


def test_a_plan_with_settings_of_modules():
    plugin = MultimodalParallelPlugin.from_any({"plan": PLAN.to_dict(), "modules": {"vision": {"freeze": True}}})
    assert plugin.plan == PLAN
    assert plugin.modules == {"vision": ModulePlugin(freeze=True)}
    assert MultimodalParallelPlugin.from_any(plugin.to_dict()) == plugin


def test_only_what_differs_is_written():
    assert ModulePlugin().to_dict() == {}
    assert PLUGIN.to_dict() == {"modules": DICT, "schedule": "1f1b"}
    json.dumps(PLUGIN.to_dict())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "`parallel=3` must be a dict of modules"),
        ("missing.yaml", "`parallel='missing.yaml'` is neither a file nor a JSON object. Give the path"),
        ({"modules": DICT, "shedule": "gpipe"}, "`parallel` has no `shedule`. Did you mean `schedule`?"),
        ({"modules": DICT, "schedule": "gipe"}, "`schedule` has no `gipe`. Did you mean `gpipe`?"),
        ({"vision": {"tp": 2}}, "A `ModulePlugin` has no `tp`. Did you mean `tp_size`?"),
        ({"vision": 2}, "`vision=2` must be a `ModulePlugin` or a dict of its settings.$"),
        (
            {"vision": {}, "bogus": 1, "language_model": {"pp_size": 2}},
            "`bogus=1` must be a `ModulePlugin` or a dict of its settings. Known: `vision`, `language_model`.$",
        ),
        (
            {"vision": {}, "schedule": "gpipe"},
            "`schedule='gpipe'` stands among the modules. Put these under `modules`, beside it.",
        ),
    ],
)
def test_what_is_no_plugin_is_a_sentence(value, message):
    with pytest.raises(ValueError, match=message):
        MultimodalParallelPlugin.from_any(value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_size": 0}, "`dp_size=0` must be a whole number of at least 1."),
        ({"tp_size": 2.0}, "`tp_size=2.0` must be a whole number"),
        ({"pp_size": True}, "`pp_size=True` must be a whole number"),
        ({"cp_size": 0}, "`cp_size=0` must be a whole number of at least 1."),
        ({"cp_size": 2, "cp_method": "ltp"}, "`cp_method` has no `ltp`. Did you mean `lpt`?"),
        ({"cp_size": 2, "cp_mode": "rows"}, "`cp_mode` has no `rows`. Did you mean `row`?"),
        ({"cp_size": 2, "cp_block": 0}, "`cp_block=0` must be a whole number of at least 1."),
        ({"cp_size": 2, "cp_method": "zigzag", "cp_mode": "segments"}, "`cp_method='zigzag'` assigns blocks"),
        ({"cp_method": "zigzag"}, "method='zigzag'.* has no effect with `cp_size=1`"),
        ({"zero_stage": 4}, "`zero_stage=4` does not exist. Use one of 0, 1, 2, 3."),
        ({"shard_size": 2}, "`shard_size=2` has no effect with `zero_stage=0`."),
        (
            {"zero_stage": 2, "reshard_after_forward": False},
            "`reshard_after_forward=False` has no effect",
        ),
        ({"zero_stage": 3, "offload_params": True}, "`zero_stage=3` divides the weights that `offload_params=True`"),
        ({"zero_stage": 1, "shard_size": 0}, "`shard_size` is `0`; it must be"),
        (
            {"pp_size": 3, "layers_per_stage": [2, 2]},
            r"`layers_per_stage=\[2, 2\]` must .* `pp_size=3` stages.",
        ),
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
    spec = model_spec()
    plan = resolve_plan(spec, {name: ModulePlugin.from_dict(own) for name, own in beside.items()}, num_microbatches=3)
    modules = {name: ModulePlugin.from_dict(own) for name, own in beside.items()}
    path = _written(tmp_path / "plan.yaml", yaml.safe_dump(layout_data(plan, modules)))
    assert path.read_text().index("language_model:") < path.read_text().index("vision:", 60)
    read = MultimodalParallelPlugin.from_any(path)
    assert list(read.plan.modules) == list(spec.modules)
    assert plan_for_model(read, frozen(spec, read), None).fingerprint == plan.fingerprint
    without_edges = {key: value for key, value in plan.to_dict().items() if key != "edges"}
    without_edges["modules"] = dict(reversed(without_edges["modules"].items()))
    turned = MultimodalParallelPlugin.from_any({"plan": without_edges, "modules": beside})
    assert plan_for_model(turned, frozen(spec, turned), None).fingerprint == plan.fingerprint


def frozen(spec, plugin):
    """The model as the settings of a plugin freeze it."""
    modules = {
        name: m.with_frozen(plugin.modules.get(name, ModulePlugin()).freeze) for name, m in spec.modules.items()
    }
    return dataclasses.replace(spec, modules=modules)


def trained(spec):
    """Module -> the names of its parameters that get a gradient."""
    return {name: [p.name for p in module.parameters if p.trainable] for name, module in spec.modules.items()}


@pytest.mark.parametrize("freeze", [True, "tower", ["embeddings"], False])
def test_what_a_run_freezes_is_frozen_by_its_file(freeze, tmp_path):
    asked = MultimodalParallelPlugin({"vision": ModulePlugin(freeze=freeze), LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    spec = frozen(model_spec(), asked)
    save_layout(tmp_path / "plan.json", plan_for_model(asked, spec, None), asked.modules)
    again = MultimodalParallelPlugin.from_any(tmp_path / "plan.json")
    assert trained(frozen(model_spec(), again)) == trained(spec)
    assert plan_for_model(again, frozen(model_spec(), again), None) == plan_for_model(asked, spec, None)
    assert ParallelPlan.load(tmp_path / "plan.json") == plan_for_model(asked, spec, None)


def test_a_plan_does_not_train_what_a_run_had_frozen():
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(freeze=True)})
    for beside in ({}, {"vision": {"freeze": False}}, {"vision": {"freeze": "tower"}}):
        thawed = MultimodalParallelPlugin.from_any({"plan": plan.to_dict(), "modules": beside})
        with pytest.raises(ValueError, match=r"`vision` replica 0 trains nothing .* (576|128) of its parameters"):
            plan_for_model(thawed, frozen(model_spec(), thawed), None)


def test_a_plan_alone_does_not_train_what_a_run_had_frozen_in_part(tmp_path):
    """Its file said `trainable: true`, so that a new run trained all of the module without a word."""
    asked = MultimodalParallelPlugin({"vision": ModulePlugin(freeze="tower")})
    spec = frozen(model_spec(), asked)
    plan = plan_for_model(asked, spec, None)
    plan.save(tmp_path / "plan.yaml")
    alone = MultimodalParallelPlugin.from_any(tmp_path / "plan.yaml")
    assert alone.plan == plan
    assert plan.to_dict()["modules"]["vision"]["replicas"][0][0]["trainable"] == "partly"
    with pytest.raises(ValueError, match=r"stage 0 of `vision` replica 0 is partly frozen .* Set `freeze` or"):
        plan_for_model(alone, frozen(model_spec(), alone), None)
    assert plan_for_model(alone, spec, None) == plan  # of a model that the user has frozen
    for freeze, partly in (("tower", True), (False, False)):
        beside = MultimodalParallelPlugin.from_any({"plan": plan.to_dict(), "modules": {"vision": {"freeze": freeze}}})
        again = plan_for_model(beside, frozen(model_spec(), beside), None)
        assert again.modules["vision"].replicas[0][0].partly_frozen == partly


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"vision": {"dp_size": 3}}, "`dp_size=3` of `vision` contradicts the plan beside it, which has 2"),
        ({LANGUAGE_MODEL: {"tp_size": 1}}, "`tp_size=1` of `language_model` contradicts the plan"),
        ({LANGUAGE_MODEL: {"activation_checkpointing": False}}, "`activation_checkpointing=False` .* contradicts"),
        ({"vision": {"colocate_with": LANGUAGE_MODEL}}, "`colocate_with='language_model'` of `vision` has no effect"),
        ({"visoin": {"freeze": True}}, "The plan has no `visoin`. Did you mean `vision`?"),
    ],
)
def test_settings_that_contradict_the_plan_beside_them_are_a_sentence(beside, message):
    with pytest.raises(ValueError, match=message):
        MultimodalParallelPlugin.from_any({"plan": PLAN.to_dict(), "modules": beside})


def test_settings_that_agree_with_the_plan_beside_them_hold():
    beside = {"vision": {"dp_size": 2, "freeze": "tower"}, LANGUAGE_MODEL: {"layers_per_stage": [1, 3], "tp_size": 2}}
    plugin = MultimodalParallelPlugin.from_any({"plan": PLAN.to_dict(), "modules": beside})
    assert layout_data(PLAN, plugin.modules)["modules"] == {"vision": {"freeze": "tower"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["modules"]["vision"].update(replica=data["modules"]["vision"].pop("replicas")),
         "Module `vision` of the plan has no `replica`. Did you mean `replicas`?"),
        (lambda data: data["modules"][LANGUAGE_MODEL]["replicas"][0][1].pop("ranks"),
         "Stage 1 of `language_model` replica 0 has no `ranks`"),
        (lambda data: data.update(shedule=data.pop("schedule")), "A plan has no `shedule`. Did you mean `schedule`?"),
        (lambda data: data["edges"][0].update(source="visoin"), "no `visoin`. Did you mean `vision`?"),
        (lambda data: data["modules"]["vision"].update(freeze=True), "Module `vision` of the plan has no `freeze`"),
        (lambda data: data["edges"].append({"source": LANGUAGE_MODEL, "target": "vision"}), "form a cycle"),
    ],
    ids=["typo", "missing", "typo at the top", "edge", "setting", "circle"],
)  # fmt: skip
def test_a_mistake_in_a_plan_is_a_sentence(change, message):
    data = PLAN.to_dict()
    change(data)
    with pytest.raises(ValueError, match=message):
        MultimodalParallelPlugin.from_any(data)


def _places(data, path=()):
    """The ways to every value of nested data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


VALUES = [None, True, "x", -1, 0, 7, 2.5, [], [[]], {}, [None], {"x": 1}, [0, "x"], {1: 2}, "1f1b"]


@settings(max_examples=400)
@given(st.data())
def test_no_mistake_in_a_file_is_anything_but_a_sentence(data):
    """One value of a file is lost, renamed, or replaced by another; what still can be read is a plan of the model."""
    whole = json.loads(json.dumps(data.draw(st.sampled_from(WHOLE))))
    *way, last = data.draw(st.sampled_from(list(_places(whole))))
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
            plan_for_model(plugin, frozen(model_spec(), plugin), None)
    except ValueError as error:
        assert len(str(error)) > 20


WHOLE = [
    PLAN.to_dict(),
    layout_data(PLAN, PLUGIN.modules),
    PLUGIN.to_dict(),
    {**DICT, LANGUAGE_MODEL: {"cp_size": 2, "cp_method": "zigzag", "cp_block": 64, "attn_implementation": "bitfield"}},
    {"modules": {"vision": {"freeze": ["a", "projector"], "dp_size": 2}}, "auto": True, "schedule": "eager"},
]
"""What `parallel=` takes, as it stands in files."""


def test_a_plan_keeps_the_arrangement_that_it_was_chosen_with(tmp_path):
    chosen = dataclasses.replace(PLAN, microbatch_assignment="tapered")
    chosen.save(tmp_path / "plan.yaml")
    assert ParallelPlan.load(tmp_path / "plan.yaml") == chosen != PLAN
    assert "microbatch_assignment" not in PLAN.to_dict()
    with pytest.raises(ValueError, match="`microbatch_assignment` has no `taper`. Did you mean `tapered`"):
        ParallelPlan.from_dict({**PLAN.to_dict(), "microbatch_assignment": "taper"})


def test_the_arrangements_of_plans_are_those_that_there_are():
    assert all(find_arrangement(name).__name__ == name for name in ARRANGEMENTS)


def test_a_function_is_no_part_of_a_plan_file():
    with pytest.raises(ValueError, match="a plan file holds names only"):
        dataclasses.replace(PLAN, microbatch_assignment=find_arrangement("tapered")).to_dict()
