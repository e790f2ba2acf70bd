"""Checkpoints of layouts: plain folders, read back by `from_pretrained` and by any other layout."""

import functools
import json
import multiprocessing
import os
import signal

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlavaForConditionalGeneration
from transformers.trainer_utils import get_last_checkpoint

from hf_mmparallel.modeling.prepare import prepare_stages
from hf_mmparallel.modeling.spec import build_model_spec
from hf_mmparallel.modeling.tensor_parallel import apply_module_tp
from hf_mmparallel.modeling.unowned import is_unowned
from hf_mmparallel.plan import ModulePlugin, parameter_shards, resolve_plan
from hf_mmparallel.runtime.optimizer_checkpoint import load_optimizer, save_optimizer
from hf_mmparallel.runtime.sharded_model import ShardedModel
from hf_mmparallel.runtime.writes import FolderSave, Writes
from hf_mmparallel.world import World
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed
from tests.modeling import test_loading as loading

LAYOUTS = {
    "whole": (1, {"vision": {}, "language_model": {"colocate_with": "vision"}}),
    "dp1+pp2": (3, {"vision": {}, "language_model": {"pp_size": 2}}),
    "dp2+tp2": (4, {"vision": {"dp_size": 2}, "language_model": {"tp_size": 2}}),
    "tp2+dp2": (4, {"vision": {"tp_size": 2}, "language_model": {"dp_size": 2}}),
    "tp2pp2": (4, {"vision": {"tp_size": 2, "pp_size": 2}, "language_model": {"colocate_with": "vision"}}),
    "shared": (2, {"vision": {"dp_size": 2}, "language_model": {"colocate_with": "vision"}}),
}


tiny_llava = functools.partial(loading.tiny_llava, num_layers=2)


def lay_out(model, layout: str):
    """Cuts and shards the model as this rank's; returns it with its spec and plan."""
    world = World()
    rank = world.rank
    spec = build_model_spec(model)
    plan = resolve_plan(spec, {name: ModulePlugin(**sizes) for name, sizes in LAYOUTS[layout][1].items()})
    prepare_stages(model, spec, plan, rank)
    owned = {name for name, shards in parameter_shards(spec, plan).items() if shards.on_rank(rank)}
    for name, module in plan.modules.items():
        for _, _, stage in module.stages():
            if len(stage.all_ranks) > 1:
                mesh = DeviceMesh("cpu", list(stage.all_ranks), mesh_dim_names=("tp",))
                if rank in stage.all_ranks:
                    apply_module_tp(model, spec.modules[name], mesh, owned)
    return ShardedModel(model, spec, plan, world)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _round(layout: str, folder: str, stock: str, tie: bool) -> None:
    """Gathers and saves one model, then reads the stock checkpoint of another."""
    model = tiny_llava(tie)
    expected = model.state_dict()
    sharded = lay_out(model, layout)
    with FolderSave(folder, sharded.world) as writes:
        sharded.save_model(writes, 20_000)
    state = sharded.gather_state_dict()
    assert (state is None) == (not sharded.world.is_first)
    if state is not None:
        assert sorted(state) == sorted(expected)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    before = dict(model.named_parameters())
    grads = {name: p.requires_grad for name, p in before.items()}
    sharded.load_model(stock)
    other = dict(tiny_llava(tie, seed=1).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and parameter.requires_grad == grads[name]
        if not sharded.holds(name):
            assert is_unowned(parameter)
        else:
            assert torch.equal(full(parameter), other[name]), name
    if tie:
        assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["dp1+pp2", "dp2+tp2", deep("tp2pp2")])
def test_layouts_save_and_read(tmp_path, layout):
    tie = layout == "dp1+pp2"
    stock, saved = tmp_path / "stock", tmp_path / "out" / "checkpoint-1"
    tiny_llava(tie, seed=1).save_pretrained(stock, save_original_format=not tie, max_shard_size="30KB")
    run_distributed(_round, LAYOUTS[layout][0], layout, str(saved), str(stock), tie, timeout=90)
    expected = tiny_llava(tie)
    model, info = LlavaForConditionalGeneration.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert os.listdir(saved.parent) == ["checkpoint-1"]
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files = {path.name for path in saved.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in expected.parameters())
    expected.save_pretrained(tmp_path / "names")  # the keys of the original format
    with safe_open(tmp_path / "names" / "model.safetensors", "pt") as reader:
        assert set(reader.keys()) == set(index["weight_map"])


def test_one_rank_writes_one_file(tmp_path):
    model = tiny_llava()
    sharded = lay_out(model, "whole")
    for max_file_bytes in (20_000, 10**9):
        writes = Writes(tmp_path)
        sharded.save_model(writes, max_file_bytes)
        writes.finish(World())
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}
    assert "architectures" in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "generation_config.json").is_file()


def _load_other(folder: str) -> None:
    lay_out(tiny_llava(), "dp1+pp2").load_model(folder)


@pytest.mark.distributed
def test_checkpoint_of_another_model_stops_all_ranks(tmp_path):
    other = tiny_llava()
    other.model.language_model.layers = other.model.language_model.layers[:1]  # the last stage alone misses something
    other.save_pretrained(tmp_path)
    messages = assert_ranks_raise(_load_other, 3, str(tmp_path), match="another model")
    assert messages[0].startswith("rank 2: ") and messages[0].endswith(messages[2])


# That state goes on under any layout, `test_optimizers.py` and `tests/trainer/test_plan_changes.py` show.


def _optimizer(model):
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for key, p in trained.items() if "bias" not in key], "weight_decay": 0.1},
        {"params": [p for key, p in trained.items() if "bias" in key], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def trained():
    """A model after a step, in which one parameter had no gradient, and its optimizer."""
    model = tiny_llava()
    optimizer = _optimizer(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name != "model.multi_modal_projector.linear_2.bias":
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def _groups() -> list[list[str]]:
    names = [name for name, p in tiny_llava().named_parameters() if p.requires_grad]
    return [[name for name in names if "bias" not in name], [name for name in names if "bias" in name]]


def test_optimizer_of_another_model(tmp_path):
    model, optimizer = trained()
    with pytest.raises(ValueError, match="optimizer.pt"):
        load_optimizer(_optimizer(model), model, tmp_path, _groups(), World())
    sharded = lay_out(model, "whole")
    save_optimizer(optimizer, sharded, Writes(tmp_path), _groups())
    other = tiny_llava(hidden_size=16)
    with pytest.raises(ValueError, match=r"another model: .*\(.*32.*\) .*\(.*16"):
        load_optimizer(_optimizer(other), other, tmp_path, _groups(), World())
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict(saved)  # as the stock Trainer does
    save_optimizer(optimizer, sharded, Writes(tmp_path / "others"), [_groups()[0], []])
    load_optimizer(optimizer, model, tmp_path / "others", _groups(), World())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(torch.load(tmp_path / "others" / "optimizer.pt", weights_only=True))
    merged = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="other parameter groups"):
        load_optimizer(merged, model, tmp_path, _groups(), World())


def _killed_while_saving(folder: str) -> None:
    with FolderSave(folder, World()) as writes:
        (writes.folder / "half").write_text("written")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_save_leaves_the_last_checkpoint(tmp_path):
    last, new = tmp_path / "checkpoint-7", tmp_path / "checkpoint-8"
    for folder in (last, new):
        with FolderSave(last, World()) as writes:
            (writes.folder / "state").write_text("complete")
        process = multiprocessing.get_context("fork").Process(target=_killed_while_saving, args=(str(folder),))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        leftovers = [path.name for path in tmp_path.iterdir() if path != last]
        assert len(leftovers) == 1 and leftovers[0].startswith("_saving-")
        assert get_last_checkpoint(str(tmp_path)) == str(last)
        assert (last / "state").read_text() == "complete"
    with FolderSave(new, World()) as writes:
        (writes.folder / "state").write_text("newer")
        assert not new.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7", "checkpoint-8"]


def test_an_error_while_saving_leaves_the_folder(tmp_path):
    with FolderSave(tmp_path / "out", World()) as writes:
        (writes.folder / "old").touch()
    with pytest.raises(OSError), FolderSave(tmp_path / "out", World()):
        raise OSError("disk full")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]
