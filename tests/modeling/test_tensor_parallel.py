"""Tensor parallelism of each family against one process."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_mmparallel.modeling.tensor_parallel import apply_module_tp, base_name, with_tp_dims
from hf_mmparallel.plan import ModelSpec, ModuleSpec, ParameterSpec
from tests.deep_cases import deep
from tests.distributed import run_distributed

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def spec_of(model: nn.Module, stack: str, prefixes: tuple[str, ...] = ("",), name: str = "module") -> ModuleSpec:
    """The parameters of `model` below the prefixes as one module."""
    pattern = re.compile(re.escape(stack) + r"\.(\d+)\.")
    parameters, layer = [], -1
    num_layers = len(model.get_submodule(stack))
    for key, parameter in model.named_parameters():
        if key.startswith(prefixes):
            found = pattern.match(base_name(key))
            layer = int(found.group(1)) if found else (-1 if layer < 0 else num_layers)
            parameters.append(ParameterSpec(key, tuple(parameter.shape), layer))
    return ModuleSpec(name, stack, num_layers, 32, 4, 2, 48, tuple(parameters))


def _text(config_name: str, model_name: str, stack: str = "layers", **extra):
    import transformers

    config = getattr(transformers, config_name)(**{**TEXT, **extra})
    model = getattr(transformers, model_name)(config)
    ids = torch.randint(1, 53, (2, 11), generator=torch.Generator().manual_seed(0))
    return model, stack, {"input_ids": ids}


def _vision(config_name: str, model_name: str, stack: str, **extra):
    import transformers

    config = getattr(transformers, config_name)(**{**VISION, **extra})
    model = getattr(transformers, model_name)(config)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return model, stack, {"pixel_values": pixels}


def _qwen2_vl_tower():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4)
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    inputs = {"hidden_states": pixels, "grid_thw": torch.tensor([[1, 4, 4]])}
    return Qwen2VisionTransformerPretrainedModel(config), "blocks", inputs


def _qwen3_vl_tower():
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4, out_hidden_size=32,
        num_position_embeddings=16, deepstack_visual_indexes=[0],
    )  # fmt: skip
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    return Qwen3VLVisionModel(config), "blocks", {"hidden_states": pixels, "grid_thw": torch.tensor([[1, 4, 4]])}


def _whisper_encoder():
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=10, dropout=0.0,
    )  # fmt: skip
    audio = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    return WhisperEncoder(config), "layers", {"input_features": audio}


def _llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_id=52,
        vision_feature_layer=-1,
    )  # fmt: skip
    ids = torch.randint(1, 52, (2, 11), generator=torch.Generator().manual_seed(0))
    ids[:, 2:6] = 52
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return LlavaForConditionalGeneration(config), "", {"input_ids": ids, "pixel_values": pixels}


# Family -> (how to build it, an attention parameter and a feed-forward parameter that must be sharded)
FAMILIES = {
    "llama": (lambda: _text("LlamaConfig", "LlamaForCausalLM"), "k_proj.weight", "up_proj.weight"),
    "qwen2": (lambda: _text("Qwen2Config", "Qwen2ForCausalLM"), "k_proj.bias", "down_proj.weight"),
    "gemma3": (
        lambda: _text("Gemma3TextConfig", "Gemma3ForCausalLM", query_pre_attn_scalar=8),
        "q_proj.weight",
        "up_proj.weight",
    ),
    "qwen3_vl_text": (
        lambda: _text("Qwen3VLTextConfig", "Qwen3VLTextModel", "layers", pad_token_id=None),
        "q_proj.weight",
        "up_proj.weight",
    ),
    "mixtral": (
        lambda: _text("MixtralConfig", "MixtralForCausalLM", num_local_experts=4),
        "q_proj.weight",
        "experts.down_proj",
    ),
    "qwen3_vl_moe_text": (
        lambda: _text("Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel", moe_intermediate_size=24, num_experts=4,
                      num_experts_per_tok=2),
        "q_proj.weight",
        "experts.gate_up_proj",
    ),
    "clip": (lambda: _vision("CLIPVisionConfig", "CLIPVisionModel", "encoder.layers"), "q_proj.bias", "fc1.bias"),
    "siglip": (
        lambda: _vision("SiglipVisionConfig", "SiglipVisionModel", "encoder.layers", vision_use_head=False),
        "out_proj.weight",
        "fc2.weight",
    ),
    "pixtral": (
        lambda: _vision("PixtralVisionConfig", "PixtralVisionModel", "transformer.layers"),
        "o_proj.weight",
        "down_proj.weight",
    ),
    "internvl": (
        lambda: _vision(
            "InternVLVisionConfig", "InternVLVisionModel", "encoder.layer",
            image_size=[16, 16], patch_size=[8, 8], attention_bias=True,
        ),
        "projection_layer.weight",
        "fc1.weight",
    ),
    "internvl_norms": (
        lambda: _vision(
            "InternVLVisionConfig", "InternVLVisionModel", "encoder.layer",
            image_size=[16, 16], patch_size=[8, 8], use_qk_norm=True,
        ),
        None,
        "fc1.weight",
    ),
    "qwen2_vl": (_qwen2_vl_tower, None, "fc1.weight"),
    "qwen3_vl": (_qwen3_vl_tower, None, "mlp.linear_fc2.weight"),
    "whisper": (_whisper_encoder, "k_proj.weight", "fc1.weight"),
}  # fmt: skip


def _build(name: str):
    torch.manual_seed(0)
    model, stack, inputs = FAMILIES[name][0]()
    with torch.no_grad():  # norms and biases away from ones and zeros
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    prefix = next(key.partition(stack + ".0.")[0] for key, _ in model.named_parameters() if stack + ".0." in key)
    stack = prefix + stack
    return model.train(), stack, inputs


def _output(model: nn.Module, inputs: dict) -> torch.Tensor:
    output = model(**inputs)
    if getattr(output, "logits", None) is not None:
        return output.logits
    if output.get("pooler_output") is not None:
        return torch.cat([output.last_hidden_state.flatten(), output.pooler_output.flatten()])
    return output.last_hidden_state


def _train_step(model: nn.Module, inputs: dict, microbatches: int = 2) -> torch.Tensor:
    """Two backwards into the same gradients, as a pipeline does; returns the output."""
    for index in range(microbatches):
        output = _output(model, inputs)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(index))
        (output * weight).sum().backward()
    return output.detach()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_equal(model: nn.Module, reference: nn.Module, inputs: dict, partial: set[str]) -> int:
    """
    Compares outputs and every gradient with the reference, after the sum of those that are shares; the number of
    sharded parameters.
    """
    expected = dict(reference.named_parameters())
    torch.testing.assert_close(_train_step(model, inputs), _train_step(reference, inputs), rtol=2e-5, atol=2e-5)
    for name in sorted(partial):
        dist.all_reduce(model.get_parameter(name).grad)
    with torch.no_grad():
        torch.testing.assert_close(_output(model, inputs), _output(reference, inputs), rtol=2e-5, atol=2e-5)
    floor = 1e-2 * max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    sharded = 0
    for name, parameter in model.named_parameters():
        gradient = expected[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is None:
            continue
        sharded += isinstance(parameter, DTensor) and parameter.to_local().shape != parameter.shape
        # The gradient of a key's bias is zero but for rounding, so that it has no scale of its own.
        scale = max(float(gradient.abs().max()), floor)
        torch.testing.assert_close(_full(parameter.grad) / scale, gradient / scale, rtol=0, atol=2e-5, msg=name)
        if not isinstance(parameter, DTensor):
            copies = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, parameter.grad.contiguous())
            assert all(torch.equal(copies[0], other) for other in copies), name
    return sharded


def _compare_family(name: str) -> None:
    model, stack, inputs = _build(name)
    reference = copy.deepcopy(model)
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tp",))
    spec = spec_of(model, stack)
    marked = with_tp_dims(model, ModelSpec({"module": spec}), {"module": (mesh.size(),)}).modules["module"]
    partial = apply_module_tp(model, spec, mesh, {p.name for p in spec.parameters})
    sharded = {
        key
        for key, p in model.named_parameters()
        if isinstance(p, DTensor) and not all(x.is_replicate() for x in p.placements)
    }
    assert {p.name for p in marked.parameters if p.tp_dim is not None} == sharded
    for p in marked.parameters:
        if p.name in sharded:
            blocks = reference.get_parameter(p.name).detach().chunk(p.tp_blocks, p.tp_dim)
            own = [block.chunk(mesh.size(), p.tp_dim)[mesh.get_local_rank()] for block in blocks]
            assert torch.equal(model.get_parameter(p.name).to_local(), torch.cat(own, p.tp_dim)), p.name
    for expected in FAMILIES[name][1:]:
        layers = [key for key, _ in model.named_parameters() if expected and key.endswith(expected)]
        assert (not expected) or (layers and sharded.issuperset(layers)), (expected, sorted(sharded))
    assert not any("embed" in key for key in sharded)
    if name == "gemma3":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    if name == "llama":
        assert "lm_head.weight" in sharded
    for key in sharded:
        local = model.get_parameter(key).to_local()
        assert local.untyped_storage().nbytes() < 0.6 * reference.get_parameter(key).numel() * 4, key
    _check_equal(model, reference, inputs, partial)


CORE = ("llama", "gemma3", "mixtral", "clip", "qwen2_vl", "whisper")


def _compare_families(names: list[str]) -> None:
    for name in names:
        print(name)  # the report of a rank that fails ends with it
        _compare_family(name)


@pytest.mark.distributed
@pytest.mark.parametrize("names", [CORE, deep([name for name in FAMILIES if name not in CORE], id="others")])
def test_families_equal_one_process(names):
    run_distributed(_compare_families, 2, names, timeout=250)


def _compare_composite(lora: bool) -> int:
    torch.manual_seed(0)
    model, _, inputs = _llava()
    if lora:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "o_proj", "out_proj", "fc2", "lm_head", "down_proj"]
        )
        inject_adapter_in_model(config, model)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.1)
    reference = copy.deepcopy(model)
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tp",))
    vision = spec_of(model, "model.vision_tower.encoder.layers", ("model.vision_tower", "model.multi_modal_projector"))
    text = spec_of(model, "model.language_model.layers", ("model.language_model", "lm_head"))
    partial = set()
    for module in (vision, text):
        partial |= apply_module_tp(model, module, mesh, {p.name for p in module.parameters})
    projector = model.model.multi_modal_projector
    assert not any(isinstance(p, DTensor) for p in projector.parameters())
    return _check_equal(model, reference, inputs, partial)


def _only_owned() -> tuple[set[str], set[str]]:
    model, stack, _ = _build("llama")
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    spec = spec_of(model, stack)
    owned = {p.name for p in spec.parameters if ".layers.1." in p.name}
    apply_module_tp(model, spec, mesh, owned)
    return {key for key, p in model.named_parameters() if isinstance(p, DTensor)}, owned


def _on_meta() -> None:
    model, stack, _ = _build("clip")
    model.to("meta")
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    spec = spec_of(model, stack)
    apply_module_tp(model, spec, mesh, {p.name for p in spec.parameters})
    weight = model.get_parameter(stack + ".0.mlp.fc1.weight")
    assert isinstance(weight, DTensor) and weight.is_meta and weight.to_local().shape == (24, 32)


def _dora() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model, stack, _ = _build("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), model)
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    spec = spec_of(model, stack)
    apply_module_tp(model, spec, mesh, {p.name for p in spec.parameters})


def _parts() -> tuple[list[int], set[str], set[str]]:
    counts = [_compare_composite(lora) for lora in (False, True)]
    _on_meta()
    with pytest.raises(ValueError, match="use_dora=False"):
        _dora()
    return counts, *_only_owned()


@pytest.mark.distributed
def test_both_modules_of_a_composite_and_only_owned_parameters_before_the_weights_are_read_without_dora():
    counts, sharded, owned = run_distributed(_parts, 2)[0]
    # LoRA: the q and v adapters' B and the o, out, fc2 and down adapters' A of two layers in each tower, the head's B
    assert counts == [2 * 7 + 1 + 2 * 10, 2 * 4 + 2 * 4 + 1]
    assert sharded == {name for name in owned if "_proj" in name}


def test_a_vector_over_heads_that_no_style_cuts_is_refused():
    """Doge's `A`; it ended the first step with "The size of tensor a (2) must match the size of tensor b (4)"."""
    model, stack, _ = _text("DogeConfig", "DogeModel")
    spec = ModelSpec({"module": spec_of(model, stack)}, ())
    with pytest.raises(ValueError, match=r"`layers.0.self_attn.A` .* 2 heads"):
        with_tp_dims(model, spec, {"module": (2,)})
    with_tp_dims(model, spec)
