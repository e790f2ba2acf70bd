"""Weights on the ranks that hold them, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from shrunk_models import build, shrunk
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.core_model_loading import revert_weight_conversion

from hf_mmparallel.modeling.loading import build_on_meta, check_equal_models, load_layers, load_owned
from hf_mmparallel.modeling.prepare import prepare_stages
from hf_mmparallel.modeling.spec import build_model_spec
from hf_mmparallel.modeling.tensor_parallel import apply_module_tp
from hf_mmparallel.modeling.unowned import is_unowned
from hf_mmparallel.plan import ModulePlugin, parameter_shards, resolve_plan
from hf_mmparallel.world import World
from tests.distributed import run_distributed


def tiny_llava(
    tie: bool = False, seed: int = 0, hidden_size: int = 32, num_layers: int = 4
) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    sizes = {"intermediate_size": 48, "num_attention_heads": 4}
    vision = CLIPVisionConfig(hidden_size=32, num_hidden_layers=2, image_size=16, patch_size=8, **sizes)
    sizes |= {"num_key_value_heads": 2, "vocab_size": 54, "pad_token_id": 0, "tie_word_embeddings": tie}
    text = LlamaConfig(hidden_size=hidden_size, num_hidden_layers=num_layers, **sizes)
    others = {"image_token_id": 52, "vision_feature_layer": -1, "tie_word_embeddings": tie}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **others))


def pruned(model: LlavaForConditionalGeneration, rank: int) -> set[str]:
    """Cuts the model to one rank of three, which are the encoder, then two stages; returns the names it owns."""
    spec = build_model_spec(model)
    plan = resolve_plan(spec, {"vision": ModulePlugin(), "language_model": ModulePlugin(pp_size=2)})
    prepare_stages(model, spec, plan, rank)
    return {name for name, shards in parameter_shards(spec, plan).items() if shards.on_rank(rank)}


def load_keys(folder: Path | str) -> list[str]:
    return list(json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"])


@pytest.mark.parametrize(
    ("rank", "tie", "original"),
    [(0, False, True), (1, True, False), (2, True, True), (0, True, False), (2, False, False)],
)
def test_owned_parameters_are_read(tmp_path, rank, tie, original):
    reference = tiny_llava(tie)
    reference.save_pretrained(tmp_path, save_original_format=original, max_shard_size="40KB")
    assert original == any(key.startswith("language_model.model") for key in load_keys(tmp_path))
    model = build_on_meta(tmp_path)
    assert type(model) is LlavaForConditionalGeneration
    assert all(p.is_meta for p in model.parameters())
    owned = pruned(model, rank)
    load_owned(model, tmp_path)
    expected = dict(reference.named_parameters())
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        assert not tensor.is_meta, name
    for name, parameter in model.named_parameters():
        assert is_unowned(parameter) == (name not in owned), name
        assert name not in owned or torch.equal(parameter, expected[name]), name
    if tie and rank == 2:
        assert model.lm_head.weight is model.get_input_embeddings().weight


def test_whole_model_equals_from_pretrained(tmp_path):
    tiny_llava().to(torch.bfloat16).save_pretrained(tmp_path)
    expected = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    model = build_on_meta(str(tmp_path))
    model.get_parameter("model.multi_modal_projector.linear_1.weight").requires_grad_(False)
    load_owned(model, tmp_path)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected.get_parameter(name))
        assert parameter.requires_grad == ("linear_1.weight" not in name)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected.get_buffer(name)), name
    assert build_on_meta(model) is model
    assert build_on_meta(model.config).dtype == torch.bfloat16


def test_a_part_is_read_from_the_checkpoint_of_the_whole(tmp_path):
    whole = Qwen2_5OmniForConditionalGeneration(shrunk(Qwen2_5OmniConfig(), {"enable_audio_output": False}))
    whole.save_pretrained(tmp_path, max_shard_size="1MB")
    assert all(key.startswith("thinker.") for key in load_keys(tmp_path))
    with torch.device("meta"):
        part = Qwen2_5OmniThinkerForConditionalGeneration(whole.config.thinker_config)
    load_owned(part, tmp_path)
    assert all(torch.equal(p, whole.thinker.get_parameter(name)) for name, p in part.named_parameters())


@pytest.mark.parametrize("family", ["diffllama", "falcon_h1"])
def test_what_a_model_draws_or_computes_for_itself_is_as_in_the_whole(tmp_path, family):
    reference = build(family)
    reference.save_pretrained(tmp_path)
    model = build_on_meta(tmp_path)
    spec = build_model_spec(model)
    prepare_stages(model, spec, resolve_plan(spec, {"language_model": ModulePlugin(pp_size=2)}), 1)
    load_owned(model, tmp_path)
    whole = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: tensor for name, tensor in own.items() if not is_unowned(tensor)}
    assert any("lambda_q1" in name or "mup_vector" in name for name in own)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in own.items())


def test_quantized_weights_are_refused(tmp_path):
    model = tiny_llava()
    model.save_pretrained(tmp_path)
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"`{tmp_path}` are quantized.*`from_pretrained` on each rank"):
        load_owned(build_on_meta(tmp_path), tmp_path)


def test_layers_are_loaded_one_after_the_other(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**sizes, num_hidden_layers=3, num_local_experts=2, vocab_size=20)
    reference = MixtralForCausalLM(config)
    reference.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors").keys()
    assert any(".experts.1." in key for key in saved)  # they are fused in the model
    whole = build_on_meta(tmp_path)
    load_owned(whole, tmp_path)
    assert all(torch.equal(p, reference.get_parameter(name)) for name, p in whole.named_parameters())
    model = build_on_meta(tmp_path)
    layers = [[f"model.layers.{i}.{name}" for name, _ in model.model.layers[i].named_parameters()] for i in (1, 0)]
    values, found = {}, []
    for names in load_layers(model, tmp_path, "cpu", layers):
        found.append(list(names))
        there = {name for name, p in model.named_parameters() if not p.is_meta}
        assert there == {name for of_layer in found for name in of_layer} & {n for n, _ in model.named_parameters()}
        for name in names:
            values[name] = model.get_parameter(name).detach().clone()
            model.get_parameter(name).data.fill_(torch.nan)  # it may have no memory any more
    assert found[:2] == layers and "model.layers.2.mlp.gate.weight" in found[2] and "lm_head.weight" in found[2]
    assert all(torch.equal(values[name], p) for name, p in reference.named_parameters())
    assert all(p.isnan().all() for p in model.parameters())  # nothing was written again
    # Keys of the layers that were loaded first are reverted as well when the model is saved.
    assert revert_weight_conversion(model, values).keys() == saved


def test_adapters_are_initialised_and_the_base_is_read(tmp_path):
    reference = tiny_llava()
    reference.save_pretrained(tmp_path)
    models = []
    for _ in range(2):
        model = build_on_meta(tmp_path)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model)
        torch.manual_seed(len(models))  # the values do not depend on the state of the generator
        load_owned(model, tmp_path)
        models.append(dict(model.named_parameters()))
    for name, parameter in models[0].items():
        assert torch.equal(parameter, models[1][name])
        if ".lora_B." in name:
            assert not parameter.any()
        elif ".lora_A." in name:
            assert parameter.std() > 0.05
        else:
            assert torch.equal(parameter, reference.get_parameter(name.replace(".base_layer", "")))
    drawn = [p for name, p in models[0].items() if ".lora_A." in name and "language_model" in name]
    assert not torch.equal(drawn[0], drawn[1])


def test_checkpoint_of_another_model(tmp_path):
    tiny_llava(hidden_size=16).save_pretrained(tmp_path / "shape")
    tiny_llava().save_pretrained(tmp_path / "key")
    file = tmp_path / "key" / "model.safetensors"
    state = load_file(file)
    del state[next(key for key in state if "layers.1.mlp.up_proj" in key)]
    save_file(state, file, metadata={"format": "pt"})
    for folder, salient in (
        (tmp_path / "shape", r"`model.safetensors` .*\(.*16"),
        (tmp_path / "key", "`model.language_model.layers.1.mlp.up_proj.weight`"),
        (tmp_path, "has neither"),
    ):
        with pytest.raises(ValueError, match=salient):
            load_owned(build_on_meta(tiny_llava().config), folder)


_MEASURE = """
import resource, sys, torch
from hf_mmparallel.modeling.loading import build_on_meta, load_owned
from tests.modeling.test_loading import pruned
model = build_on_meta(sys.argv[1])
pruned(model, 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_owned(model, sys.argv[1])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
held = sum(p.untyped_storage().nbytes() for p in model.parameters())
sys.stdout.write(f"{(after - before) * 1024} {held}")
"""


@pytest.mark.slow
@pytest.mark.deep
def test_a_rank_reads_its_share(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
    text = LlamaConfig(**sizes, vocab_size=64)
    config = LlavaConfig(vision_config=tiny_llava().config.vision_config, text_config=text, image_token_id=52)
    whole = LlavaForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    total = sum(p.numel() * 4 for p in whole.parameters())
    del whole
    assert total > 250e6
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment)
    grown, held = (int(value) for value in result.stdout.split())
    assert 0.45 * total < held < 0.55 * total
    assert grown < 1.25 * held  # pages of the mapped file that belong to other ranks never become resident


def _load_sharded(folder: str) -> None:
    """Two ranks each read their shards of all parameters."""
    model = build_on_meta(folder)
    reference = type(model).from_pretrained(folder)
    spec = build_model_spec(model)
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    if mesh.get_coordinate() is None:
        return
    for module in spec.modules.values():
        apply_module_tp(model, module, mesh, {p.name for p in module.parameters})
    load_owned(model, folder)
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(full, reference.get_parameter(name)), name


def _check_equal(folders: list[str]) -> str:
    """The refusal of a model that is different on rank 1."""
    for folder in folders:
        _load_sharded(folder)
    model = tiny_llava()
    check_equal_models(model, World())
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.lm_head.weight[3, 4] += 1e-6
    with pytest.raises(ValueError) as raised:
        check_equal_models(model, World())
    return str(raised.value)


@pytest.mark.distributed
def test_shards_are_read_and_models_of_all_ranks_are_compared(tmp_path):
    folders = [str(tmp_path / "named"), str(tmp_path / "fused")]
    tiny_llava().save_pretrained(folders[0])
    build("hrm_text").save_pretrained(folders[1], max_shard_size="100KB")
    assert "H_module.layers.0.attn.gqkv_proj.weight" in str(load_keys(folders[1]))
    (message,) = set(run_distributed(_check_equal, 3, folders))
    assert "`lm_head.weight` is different on ranks [0, 2] than on rank 1" in message
