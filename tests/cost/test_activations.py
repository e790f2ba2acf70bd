"""What layers are said to keep, against what autograd keeps of models."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import analytic_costs
from hf_mmparallel.cost.activations import LayerShape, Precision, kept_activations, saved_activations
from hf_mmparallel.cost.layers import OURS, OURS_FUSED, Engine
from hf_mmparallel.cost.memory import activation_sizes
from hf_mmparallel.modeling import build_model_spec, prepare
from hf_mmparallel.modeling.compiled_layers import Compilation, compile_layers
from hf_mmparallel.modeling.sequence_parallel import keep_rows_split
from hf_mmparallel.modeling.spec import activation_copies
from hf_mmparallel.modeling.tensor_parallel import apply_module_tp
from hf_mmparallel.modeling.unowned import local
from hf_mmparallel.plan import LANGUAGE_MODEL, ParameterSpec, ParameterUse, SampleSizes, resolve_plan
from hf_mmparallel.plan.checkpointing import SELECTIVE
from tests.cost.models import PLAIN, text_model
from tests.deep_cases import deep
from tests.distributed import run_distributed

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}
LENGTH, SAMPLES = 48, 2
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "phi3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16},
}


def build(family: str, **settings: Any) -> Any:
    """A language model in training."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **settings})
    return AutoModelForCausalLM.from_config(config).train()


def saved_by_autograd(model: Any, is_uneven: bool = False, is_cast: bool = False) -> dict[int, int]:
    """Layer, or one more for what is behind them -> bytes that its operations are the first to keep, but weights."""
    layers = model.get_decoder().layers
    weights = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, tuple[int, int]] = {}
    held: list[torch.Tensor] = []
    place = [-1]
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: place.append(index))
    layers[-1].register_forward_hook(lambda *_: place.append(len(layers)))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found.setdefault(storage.data_ptr(), (place[-1], storage.nbytes()))
        held.append(tensor)  # so that no address is used again
        return tensor

    ids = torch.randint(1, 300, (SAMPLES, LENGTH))
    mask = torch.ones_like(ids)
    if is_uneven:
        mask[0, LENGTH // 2 :] = 0
    cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        embeddings = model.get_input_embeddings()(ids).requires_grad_()
        model(inputs_embeds=embeddings, attention_mask=mask, labels=ids)
    result: dict[int, int] = {}
    for layer, num_bytes in found.values():
        result[layer] = result.get(layer, 0) + num_bytes
    return result


def predicted(
    model: Any, value_bytes: int = 4, is_uneven: bool = False, tp_size: int = 1, engine: Engine = OURS
) -> dict[int, float]:
    """Layer -> bytes, as derived from the model's description."""
    spec = build_model_spec(model)
    part = spec.language_model
    tokens = SAMPLES * LENGTH
    squares = SAMPLES * LENGTH**2 if is_uneven or part.attention == "eager" else 0
    precision = Precision.of(part, value_bytes)
    kept = {
        index: saved_activations(part, spec.uses[part.name, index], index, precision, tp_size, engine)(tokens, squares)
        for index in range(part.num_layers + 1)
    }
    kept[part.num_layers] += 4 * model.config.vocab_size * tokens  # of the loss
    return kept


def check(model: Any, tolerance: float = 0.04, value_bytes: int = 4, is_uneven: bool = False, is_cast: bool = False):
    found = saved_by_autograd(model, is_uneven, is_cast)
    expected = predicted(model, value_bytes, is_uneven)
    for index in (1, 2):  # the first layer also keeps what all share, such as rotary tables
        assert expected[index] == pytest.approx(found[index], rel=tolerance), (index, expected, found)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_a_trained_layer_keeps_what_is_derived(family, precision):
    model = build(family)
    if precision == "bfloat16":
        model = model.bfloat16()
    check(model, 0.06, 4 if precision == "float32" else 2, is_cast=precision == "autocast")


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_frozen_layer_keeps_nothing_of_what_its_matrices_take(family):
    model = build(family)
    trained = predicted(model)
    check(model.requires_grad_(False), 0.06)
    frozen = predicted(model)
    assert all(frozen[index] < 0.8 * trained[index] for index in (0, 1))


@pytest.mark.parametrize(("family", "freeze"), [("llama", False), deep("qwen3", True)])
def test_a_compiled_layer_keeps_what_its_norms_and_activation_functions_read(family, freeze):
    model = build(family).bfloat16().requires_grad_(not freeze)
    compile_layers(model.get_decoder().layers, Compilation("aot_eager"))
    saved_by_autograd(model)  # compiles
    expected, eager = predicted(model, 2, engine=OURS_FUSED), predicted(model, 2)
    assert expected[1] == pytest.approx(saved_by_autograd(model)[1], rel=1e-3)
    assert expected[1] < 0.8 * eager[1]


def kept_by_operations(model: Any, monkeypatch: pytest.MonkeyPatch, is_cast: bool) -> int:
    """Bytes that the second layer keeps of its operations, which its backward takes from there."""
    modes, contexts = [], prepare.create_selective_checkpoint_contexts
    monkeypatch.setattr(
        prepare, "create_selective_checkpoint_contexts", lambda keeps: modes.append(contexts(keeps)) or modes[-1]
    )
    part = build_model_spec(model).language_model
    prepare.enable_checkpointing(model, part.tower, part.stack, prepare.Recomputation().of(SELECTIVE))
    ids = torch.randint(1, 300, (SAMPLES, LENGTH))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
        loss = model(inputs_embeds=model.get_input_embeddings()(ids).requires_grad_(), labels=ids).loss

    def held() -> list[torch.Tensor]:
        leaves = (getattr(leaf, "val", None) for leaf in tree_leaves(modes[1][0].storage))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held()}
    loss.backward()
    assert len(held()) < len(kept) / 2  # of the last products, which nothing is computed from again
    return sum(kept.values())


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "autocast"), ("llama", "eager"), ("qwen3", "adapters"), ("phi3", ""), ("qwen3_moe", "")],
)
def test_a_layer_that_recomputes_all_but_products_keeps_their_outputs(family, kind, monkeypatch):
    model: Any = build(family, **({"attn_implementation": kind} if kind == "eager" else {}))
    if kind == "adapters":
        model = inject_adapter_in_model(LoraConfig(r=8, target_modules="all-linear"), model)
    part = build_model_spec(model).language_model
    precision = Precision.of(part, 2 if kind == "autocast" else 4)
    kept, _ = kept_activations(part, build_model_spec(model).uses[part.name, 1], precision, 1)
    found = kept_by_operations(model, monkeypatch, kind == "autocast")
    assert kept(SAMPLES * LENGTH, 0) == pytest.approx(found, rel=1e-6)


def test_a_module_of_which_some_layers_are_trained():
    model = build("llama").requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(re.search(r"layers\.1\.mlp", name)))
    check(model)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_adapters_keep_the_inputs_of_the_layers_that_they_adapt(targets, is_narrow):
    model: Any = build("llama")
    model = inject_adapter_in_model(LoraConfig(r=8, target_modules=targets), model.bfloat16() if is_narrow else model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    check(model, 0.06, 2 if is_narrow else 4)


def check_share(kind: str, is_cast: bool) -> None:
    """Compares what a rank of a tp group keeps."""
    model: Any = build("llama")
    if kind == "frozen":
        model.requires_grad_(False)
    elif kind != "trained":
        model = inject_adapter_in_model(LoraConfig(r=8), model.bfloat16() if kind == "wide adapters" else model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    expected = predicted(model, 2 if is_cast or kind == "wide adapters" else 4, tp_size=dist.get_world_size())
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tp",))
    module = build_model_spec(model).language_model
    assert module.row_shares(mesh.size()) == mesh.size()
    apply_module_tp(model, module, mesh, {parameter.name for parameter in module.parameters})
    keep_rows_split(dict(enumerate(model.model.layers)), {-1, len(model.model.layers) - 1})
    found = saved_by_autograd(model, is_cast=is_cast)
    assert expected[1] == pytest.approx(found[1], rel=0.06), (kind, is_cast, expected, found)


def check_shares() -> None:
    for kind in ("trained", "frozen", "adapters", "wide adapters"):
        for is_cast in (False, True):
            check_share(kind, is_cast)


@pytest.mark.distributed
def test_a_rank_of_a_tp_group_keeps_its_share_of_what_a_block_reads():
    run_distributed(check_shares, 2)


def test_scores_and_masks_grow_with_the_square():
    check(build("llama", attn_implementation="eager"))
    check(build("llama", attn_implementation="eager").bfloat16(), value_bytes=2)
    for attention in ("sdpa", "bitfield"):  # which takes the same mask where it gets no words
        check(build("llama", num_key_value_heads=4, attn_implementation=attention), 0.01, is_uneven=True)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_keys_and_values_repeated_under_a_dense_mask_are_kept(kv_heads):
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    model = build("llama", **sizes, num_key_value_heads=kv_heads).bfloat16()
    spec = build_model_spec(model)
    costs, plan = analytic_costs(spec, PLAIN), resolve_plan(spec, {})
    rows = SampleSizes.of_sequences({LANGUAGE_MODEL: [[LENGTH // 2], [LENGTH]]})
    (held,) = activation_sizes(costs, plan, contiguous_step(plan, range(SAMPLES), SAMPLES), rows).values()
    layer = costs.layers.layer(LANGUAGE_MODEL, 1, 1).activations
    assert layer.square * held[0] + layer.token * held[1] == pytest.approx(saved_by_autograd(model, True)[1], rel=1e-3)


def test_a_mixture_keeps_what_its_chosen_experts_take():
    check(build("qwen3_moe"), tolerance=0.06)  # without what the router keeps


def test_activation_functions_keep_as_many_tensors_as_they_take_steps():
    assert activation_copies("silu") == activation_copies("gelu") == activation_copies(None) == 1
    assert activation_copies("quick_gelu") == 2 and activation_copies("gelu_new") > 2


def test_a_convolution_of_each_channel_by_itself_is_no_mixture_of_experts():
    convolution = ParameterSpec("mixer.conv1d.weight", (96, 1, 4), 0)
    experts = ParameterSpec("mlp.experts.weight", (8, 16, 32), 0, active_share=0.25)
    uses = [ParameterUse(parameter, True) for parameter in (convolution, experts)]
    found = {
        m.name: (m.shape, m.copies, m.num_experts) for m in LayerShape.of(text_model().language_model, uses).matrices
    }
    assert found == {"mixer.conv1d": ((96, 4), 1.0, 1), "mlp.experts": ((16, 32), 2.0, 8)}


@pytest.mark.parametrize("is_narrow", [False, True])
def test_adapters_of_experts_keep_a_copy_of_their_weights_and_what_these_multiply(is_narrow: bool):
    model: Any = build("qwen3_moe")
    config = LoraConfig(r=8, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model = inject_adapter_in_model(config, model.bfloat16() if is_narrow else model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    check(model, 0.06, 2 if is_narrow else 4)
