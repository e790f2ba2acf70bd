"""Checkpoints of layouts: plain folders, read back by `from_pretrained` and by any other layout."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_mmparallel.modeling.hollow import is_hollow
from hf_mmparallel.modeling.spec import build_model_spec
from hf_mmparallel.modeling.stages import prepare_stages
from hf_mmparallel.modeling.tensor_parallel import apply_module_tp
from hf_mmparallel.plan import ModulePlugin, holdings, resolve_plan
from hf_mmparallel.runtime.checkpoint import (
    atomic_folder,
    gather_state_dict,
    load_model,
    save_model,
)
from tests.distributed import assert_ranks_raise, run_distributed

LAYOUTS = {
    "whole": (1, {"vision": {}, "language_model": {"colocate_with": "vision"}}),
    "dp1+pp2": (3, {"vision": {}, "language_model": {"pp_size": 2}}),
    "dp2+tp2": (4, {"vision": {"dp_size": 2}, "language_model": {"tp_size": 2}}),
    "tp2+dp2": (4, {"vision": {"tp_size": 2}, "language_model": {"dp_size": 2}}),
    "tp2pp2": (4, {"vision": {"tp_size": 2, "pp_size": 2}, "language_model": {"colocate_with": "vision"}}),
    "shared": (2, {"vision": {"dp_size": 2}, "language_model": {"colocate_with": "vision"}}),
}


def tiny_llava(tie: bool = False, seed: int = 0, hidden_size: int = 32) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    sizes = {"intermediate_size": 48, "num_attention_heads": 4}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(hidden_size=32, num_hidden_layers=2, image_size=16, patch_size=8, **sizes),
            text_config=LlamaConfig(
                hidden_size=hidden_size, num_hidden_layers=2, num_key_value_heads=2, vocab_size=54,
                pad_token_id=0, tie_word_embeddings=tie, **sizes,
            ),
            image_token_id=52, vision_feature_layer=-1, tie_word_embeddings=tie,
        )
    )  # fmt: skip


def lay_out(model, layout: str):
    """Cuts and shards the model as this rank's; returns its spec and plan."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    spec = build_model_spec(model)
    plan = resolve_plan(spec, {name: ModulePlugin(**sizes) for name, sizes in LAYOUTS[layout][1].items()})
    prepare_stages(model, spec, plan, rank)
    owned = {name for name, holding in holdings(spec, plan).items() if holding.peers(rank) is not None}
    for name, module in plan.modules.items():
        for _, _, stage in module.stages():
            if len(stage.all_ranks) > 1:
                mesh = DeviceMesh("cpu", list(stage.all_ranks), mesh_dim_names=("tp",))
                if rank in stage.all_ranks:
                    apply_module_tp(model, spec.modules[name], mesh, owned)
    return spec, plan, rank


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _save(layout: str, folder: str, tie: bool, max_shard_bytes: int) -> None:
    model = tiny_llava(tie)
    spec, plan, rank = lay_out(model, layout)
    with atomic_folder(folder) as temporary:
        save_model(model, spec, plan, rank, temporary, max_shard_bytes)


@pytest.mark.distributed
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_folder_is_read_by_from_pretrained(tmp_path, layout, tie):
    folder = tmp_path / "checkpoint-1"
    run_distributed(_save, LAYOUTS[layout][0], layout, str(folder), tie, 20_000)
    expected = tiny_llava(tie)
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert set(index["weight_map"].values()) == set(files) and len(files) > 2
    # the names of the original format, as `save_pretrained` has them
    expected.save_pretrained(tmp_path / "stock")
    with safe_open(tmp_path / "stock" / "model.safetensors", "pt") as stock:
        assert set(stock.keys()) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in expected.parameters())


def test_one_rank_writes_one_file(tmp_path):
    model = tiny_llava()
    spec, plan, rank = lay_out(model, "whole")
    save_model(model, spec, plan, rank, tmp_path, 20_000)
    save_model(model, spec, plan, rank, tmp_path)
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}
    assert "architectures" in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "generation_config.json").is_file()


def _load(layout: str, folder: str, tie: bool) -> None:
    model = tiny_llava(tie, seed=1)
    expected = dict(tiny_llava(tie).named_parameters())
    spec, plan, rank = lay_out(model, layout)
    before = dict(model.named_parameters())
    grads = {name: p.requires_grad for name, p in before.items()}
    load_model(model, spec, plan, rank, folder)
    table = holdings(spec, plan)
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and parameter.requires_grad == grads[name]
        if table[name].peers(rank) is None:
            assert is_hollow(parameter)
        else:
            assert torch.equal(_full(parameter), expected[name]), name
    if tie:
        assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.distributed
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_reads_any_folder(tmp_path, layout, tie):
    tiny_llava(tie).save_pretrained(tmp_path, save_original_format=tie, max_shard_size="30KB")
    run_distributed(_load, LAYOUTS[layout][0], layout, str(tmp_path), tie)


def _load_other(folder: str) -> None:
    model = tiny_llava()
    spec, plan, rank = lay_out(model, "dp1+pp2")
    load_model(model, spec, plan, rank, folder)


@pytest.mark.distributed
def test_checkpoint_of_another_model_stops_all_ranks(tmp_path):
    other = tiny_llava()
    other.model.language_model.layers = other.model.language_model.layers[:1]  # the last stage alone misses something
    other.save_pretrained(tmp_path)
    messages = assert_ranks_raise(_load_other, 3, str(tmp_path), match="another model: none of its files has")
    assert messages[0].startswith("rank 2: ") and messages[0].endswith(messages[2])


def _gather(layout: str, tie: bool) -> None:
    model = tiny_llava(tie)
    expected = model.state_dict()
    spec, plan, rank = lay_out(model, layout)
    state = gather_state_dict(model, spec, plan, rank)
    if rank:
        assert state is None
    else:
        assert sorted(state) == sorted(expected)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dict_on_the_first_rank(layout):
    run_distributed(_gather, LAYOUTS[layout][0], layout, layout == "dp1+pp2")


def _killed_while_saving(folder: str) -> None:
    with atomic_folder(folder) as temporary:
        (temporary / "half").write_text("written")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_save_leaves_the_last_checkpoint(tmp_path):
    from transformers.trainer_utils import get_last_checkpoint

    last, new = tmp_path / "checkpoint-7", tmp_path / "checkpoint-8"
    for folder in (last, new):
        with atomic_folder(last) as temporary:
            (temporary / "state").write_text("complete")
        process = multiprocessing.get_context("forkserver").Process(target=_killed_while_saving, args=(str(folder),))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        leftovers = [path.name for path in tmp_path.iterdir() if path != last]
        assert len(leftovers) == 1 and leftovers[0].startswith("_saving-")
        assert get_last_checkpoint(str(tmp_path)) == str(last)
        assert (last / "state").read_text() == "complete"
    with atomic_folder(new) as temporary:
        (temporary / "state").write_text("newer")
        assert not new.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7", "checkpoint-8"]


def test_an_error_while_saving_leaves_the_folder(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "old").touch()
    with pytest.raises(OSError), atomic_folder(tmp_path / "out") as folder:
        raise OSError("disk full")
    assert [path.name for path in Path(tmp_path, "out").iterdir()] == ["old"]
