"""Adapters of several modules: one `peft` adapter, saved from any layout."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel
from torch.distributed.tensor import DTensor

from hf_mmparallel.modeling.adapter import add_adapters, modules_to_save, saved_config
from hf_mmparallel.modeling.spec import build_model_spec
from hf_mmparallel.runtime.writes import Writes
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed
from tests.runtime.test_checkpoint import LAYOUTS, full, lay_out, tiny_llava

TEXT = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
VISION = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "fc2"], "layers_to_transform": [1]}
BOTH = {"language_model": TEXT, "vision": VISION}
INPUTS = {
    "input_ids": torch.tensor([[5, 52, 52, 52, 52, 7, 8]]),
    "pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16),
}


def with_shift(value: float = 0.0):
    """A model whose projector has a buffer beside its weights, as routers of experts do."""
    model = tiny_llava()
    model.model.multi_modal_projector.register_buffer("shift", torch.full((3,), value))
    return model


def adapted(configs, train_projector: bool = False):
    model = with_shift(7.0)
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(train_projector)
    adapter = add_adapters(model, build_model_spec(model), configs)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.normal_(std=0.2, generator=generator)
    return model.eval(), adapter


def layers_of(model, matrix: str) -> set[str]:
    return {name.partition(f".{matrix}.")[0] for name, _ in model.named_parameters() if f".{matrix}." in name}


def test_each_module_has_its_own_layers_ranks_and_scales():
    model, adapter = adapted(BOTH | {"vision": LoraConfig(**VISION)})
    text = ("self_attn.q_proj", "mlp.down_proj")
    layers = {f"model.language_model.layers.{i}.{name}" for i in range(2) for name in text}
    layers |= {f"model.vision_tower.encoder.layers.1.{name}" for name in ("self_attn.q_proj", "mlp.fc2")}
    assert layers_of(model, "lora_A") == layers
    for name in layers:
        layer = model.get_submodule(name)
        found = layer.r["default"], layer.scaling["default"]
        assert found == ((2, 8.0) if "vision" in name else (4, 2.0))
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())
    assert adapter.config.rank_pattern and adapter.config.r == 4


def test_modules_without_adapters_keep_what_they_train():
    model, _ = adapted({"language_model": TEXT}, train_projector=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name}
    assert trained == {f"model.multi_modal_projector.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    adapters = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert modules_to_save(build_model_spec(model), adapters) == ["model.multi_modal_projector"]


def test_a_head_that_is_tied_is_a_layer_of_its_module():
    """Its weight is named after the embedding, so that `lm_head` among `target_modules` was left out unsaid."""
    model: Any = tiny.FAMILIES["llama_tied"]()
    targets = {"language_model": {**TEXT, "target_modules": ["q_proj", "lm_head"]}}
    adapter = add_adapters(model, build_model_spec(model), targets)
    assert "lm_head" in layers_of(model, "lora_A")
    assert saved_config(model, build_model_spec(model), adapter).modules_to_save is None


@pytest.mark.parametrize(("target", "matrices"), [({}, 2), ({"target_modules": "all-linear"}, 7)])
def test_default_targets_and_all_linear(target, matrices):
    model, _ = adapted({"language_model": {"r": 2, **target}})
    layers = layers_of(model, "lora_A")
    assert len(layers) == 2 * matrices and {name.rpartition(".")[2] for name in layers} >= {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"language_model": {**TEXT, "modules_to_save": ["lm_head"]}}, "modules_to_save"),
        ({"language_model": {**TEXT, "bias": "all"}}, "bias='all'"),
        ({"language_model": {**TEXT, "init_lora_weights": "pissa"}}, "pissa"),
        ({"language_model": IA3Config()}, "`IA3Config`"),
        ({"language_model": AdaLoraConfig(total_step=4)}, "`AdaLoraConfig`"),
        ({"language_model": {"peft_type": "ADALORA", "total_step": 4}}, "`AdaLoraConfig`"),
        ({"language_model": {"target_modules": ["fc1"]}}, "`language_model`"),
        ({"language_model": {"target_parameters": ["experts.down_proj"]}}, "matches none .*`model.language_model"),
        ({"language_model": {"target_parameters": ["mlp.down_proj.weight"]}}, "not of experts .*`target_modules`"),
        ({"vision": {"r": 2}}, "`target_modules` .*`vision`"),
        ({"audio": TEXT}, "`audio`"),
        ({"language_model": {**TEXT, "lora_dropout": 0.1}, "vision": VISION}, "`lora_dropout` is 0.1 .* 0.0"),
    ],
)
def test_what_cannot_be_one_adapter_is_refused(configs, message):
    model = tiny_llava()
    with pytest.raises(ValueError, match=message):
        add_adapters(model, build_model_spec(model), configs)
    assert not layers_of(model, "lora_A")


def _save_and_read(layout: str, folder: str, train_projector: bool) -> None:
    model, adapter = adapted({"language_model": TEXT} if train_projector else BOTH, train_projector)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    sharded = lay_out(model, layout)
    dist.gather_object = None  # gives rank 0 room for as many times the largest part as there are ranks
    adapters, base = Writes(folder), Writes(folder + "-base")
    sharded.save_adapters(adapters, adapter)
    sharded.save_model(base)
    adapters.finish(sharded.world)
    base.finish(sharded.world)
    trained = {p.name for module in sharded.spec.modules.values() for p in module.parameters if p.trainable}
    parameters = {n: p for n, p in model.named_parameters() if n in sharded.shards and sharded.holds(n)}
    with torch.no_grad():
        for parameter in parameters.values():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(5.0)
    shifts = [buffer.fill_(5.0) for name, buffer in model.named_buffers() if name.endswith(".shift")]
    sharded.load_adapters(folder, adapter)
    assert all((shift == (7.0 if train_projector else 5.0)).all() for shift in shifts)
    for name, parameter in parameters.items():
        value = full(parameter)
        assert torch.equal(value, expected[name] if name in trained else torch.full_like(value, 5.0)), name
    sharded.load_model(folder + "-base")
    for name, parameter in parameters.items():
        assert torch.equal(full(parameter), expected[name]), name
    other, adapter = adapted({"language_model": {**TEXT, "target_modules": ["k_proj"]}})
    with pytest.raises(ValueError, match="k_proj.lora_A.weight"):
        lay_out(other, layout).load_adapters(folder, adapter)


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "train_projector"), [("dp1+pp2", True), deep("tp2pp2", False)])
def test_adapters_saved_from_ranks_are_read_by_peft(tmp_path, layout, train_projector):
    folder = str(tmp_path / "adapter")
    run_distributed(_save_and_read, LAYOUTS[layout][0], layout, folder, train_projector, timeout=90)
    model, _ = adapted({"language_model": TEXT} if train_projector else BOTH, train_projector)
    read = PeftModel.from_pretrained(with_shift(), folder).eval()
    shifts = [buffer for name, buffer in read.named_buffers() if ".modules_to_save." in name and "shift" in name]
    assert len(shifts) == train_projector and all((shift == 7.0).all() for shift in shifts)
    with torch.no_grad():
        torch.testing.assert_close(read(**INPUTS).logits, model(**INPUTS).logits, rtol=0, atol=0)
        assert not torch.allclose(tiny_llava().eval()(**INPUTS).logits, model(**INPUTS).logits, atol=0.1)
    base = type(tiny_llava()).from_pretrained(folder + "-base")
    for name, tensor in tiny_llava().state_dict().items():
        if "multi_modal_projector" not in name or not train_projector:
            assert torch.equal(base.state_dict()[name], tensor), name
