"""Tensor parallelism of each family against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.sequence_parallel import keep_rows_split
from hf_mmparallel.modeling.tensor_parallel import apply_module_tp, with_tp_dims
from hf_mmparallel.plan import ModelSpec
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

# Family -> ends of the names of parameters that must be sharded: of attention and of the feed-forward, by module
SHARDED = {
    "llama_tied": ("k_proj.weight", "up_proj.weight", "embed_tokens.weight"),
    "llava": (
        "embed_tokens.weight",
        "self_attn.q_proj.bias",
        "fc1.bias",
        "k_proj.weight",
        "down_proj.weight",
        "lm_head.weight",
    ),
    "qwen2_vl": ("fc1.weight", "k_proj.bias", "up_proj.weight"),
    "qwen3_vl_moe": ("mlp.linear_fc2.weight", "q_proj.weight", "experts.gate_up_proj", "experts.down_proj"),
    "voxtral": ("audio_tower.layers.0.self_attn.k_proj.weight", "fc1.weight", "up_proj.weight"),
    "gemma3": ("out_proj.weight", "fc2.weight", "q_proj.weight", "up_proj.weight"),
    "internvl": ("projection_layer.weight", "fc1.weight", "k_proj.bias", "down_proj.weight"),
    "mistral3": ("vision_tower.transformer.layers.0.attention.o_proj.weight", "down_proj.weight"),
    "qwen3_vl": ("mlp.linear_fc2.weight", "q_proj.weight", "up_proj.weight"),
    "qwen2_5_omni": ("fc1.weight", "k_proj.bias", "up_proj.weight"),
}
CORE = ["llama_tied", "llava", "qwen3_vl_moe"]
Batch = dict[str, torch.Tensor]


def tp_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tp",))


def shard(model: nn.Module, spec: ModelSpec, owned: str = "") -> set[str]:
    """Shards the parameters whose names have `owned` in them; returns those whose gradients are shares of a sum."""
    mesh, partial = tp_mesh(), set()
    for module in spec.modules.values():
        partial |= apply_module_tp(model, module, mesh, {p.name for p in module.parameters if owned in p.name})
    return partial


def build(family: str) -> tuple[nn.Module, Batch]:
    """A model and a batch of two samples."""
    model = tiny.FAMILIES[family]()
    torch.manual_seed(0)
    with torch.no_grad():  # norms and biases away from ones and zeros
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    batch = tiny.collate(family)(tiny.make_dataset(family, 2))
    batch.pop("labels")
    return model.train(), batch


def train_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Two backwards into the same gradients, as a pipeline does; returns the output."""
    for seed in range(2):
        logits = model(**batch, use_cache=False).logits
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
        (logits * weight).sum().backward()
    return logits.detach()


def check_equal(model: nn.Module, reference: nn.Module, batch: Batch, partial: set[str]) -> int:
    """
    Compares outputs and every gradient with the reference, after the sum of those that are shares; the number of
    sharded parameters.
    """
    expected = dict(reference.named_parameters())
    torch.testing.assert_close(train_step(model, batch), train_step(reference, batch), rtol=2e-5, atol=2e-5)
    for name in sorted(partial):
        if (gradient := model.get_parameter(name).grad) is not None:
            dist.all_reduce(gradient)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, reference(**batch).logits, rtol=2e-5, atol=2e-5)
    floor = 1e-2 * max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    sharded = 0
    for name, parameter in model.named_parameters():
        gradient = expected[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is None:
            continue
        found = parameter.grad
        # The gradient of a key's bias is zero but for rounding, so that it has no scale of its own.
        scale = max(float(gradient.abs().max()), floor)
        if isinstance(parameter, DTensor):
            sharded += parameter.to_local().shape != parameter.shape
            found = found.full_tensor()
        else:
            copies = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, found.contiguous())
            assert all(torch.equal(copies[0], other) for other in copies), name
        torch.testing.assert_close(found / scale, gradient / scale, rtol=0, atol=2e-5, msg=name)
    return sharded


def compare(family: str) -> None:
    """Shards, their memory and a training step of a family."""
    model, batch = build(family)
    reference, spec, rank = copy.deepcopy(model), build_model_spec(model), dist.get_rank()
    marked = with_tp_dims(model, spec, dict.fromkeys(spec.modules, (2,)))
    partial = shard(model, spec)
    sharded = {
        name
        for name, p in model.named_parameters()
        if isinstance(p, DTensor) and not all(placement.is_replicate() for placement in p.placements)
    }
    dims = {p.name: p for module in marked.modules.values() for p in module.parameters if p.tp_dim is not None}
    assert dims.keys() == sharded
    for name, p in dims.items():
        whole, local = reference.get_parameter(name).detach(), model.get_parameter(name).to_local()
        own = [block.chunk(2, p.tp_dim)[rank] for block in whole.chunk(p.tp_blocks, p.tp_dim)]
        assert torch.equal(local, torch.cat(own, p.tp_dim)), name
        assert local.untyped_storage().nbytes() < 0.6 * whole.numel() * 4, name
    for ending in SHARDED[family]:
        names = {name for name, _ in reference.named_parameters() if name.endswith(ending)}
        assert names and names <= sharded, ending
    lookups = {name for name in sharded if "embed" in name}
    assert {model.get_parameter(name) for name in lookups} == {model.get_input_embeddings().weight}
    assert not any("multi_modal_projector" in name for name in sharded)
    if spec.tied:
        assert model.lm_head.weight is model.get_input_embeddings().weight
    check_equal(model, reference, batch, partial)


def compare_all(families: list[str]) -> None:
    for family in families:
        print(family)  # noqa: T201 (the report of a rank that fails ends with it)
        compare(family)


@pytest.mark.distributed
@pytest.mark.parametrize("families", [CORE, deep([name for name in SHARDED if name not in CORE], id="others")])
def test_families_equal_one_process(families):
    run_distributed(compare_all, 2, families, timeout=250)


def with_adapters() -> int:
    """The number of sharded parameters of adapters, of which a training step is compared."""
    model, batch = build("llava")
    targets = ["q_proj", "v_proj", "o_proj", "out_proj", "fc2", "lm_head", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets), model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    reference = copy.deepcopy(model)
    return check_equal(model, reference, batch, shard(model, build_model_spec(model)))


def with_odd_words(tied: bool) -> None:
    """A number of words that the ranks can't share evenly, and a padding word."""
    config = LlamaConfig(**{**tiny.TEXT, "vocab_size": tiny.VOCAB_SIZE + 1, "tie_word_embeddings": tied})
    config.pad_token_id = tiny.VOCAB_SIZE - 1
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    batch = {
        "input_ids": torch.randint(config.vocab_size, (2, 9)).index_fill(1, torch.tensor([4]), tiny.VOCAB_SIZE - 1)
    }
    reference = copy.deepcopy(model)
    check_equal(model, reference, batch, shard(model, build_model_spec(model)))
    assert model.model.embed_tokens.weight.to_local().shape[0] < config.vocab_size


def adapted_words() -> None:
    """Embeddings that adapters read too, or that are tied to a head with one, are whole on each rank."""
    for targets in (["embed_tokens"], ["lm_head"]):
        model, batch = build("llama_tied")
        inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)
        for name, parameter in model.named_parameters():  # equal on all ranks
            torch.manual_seed(len(name))
            if "lora" in name:
                nn.init.normal_(parameter, std=0.1)
        reference = copy.deepcopy(model)
        check_equal(model, reference, batch, shard(model, build_model_spec(model)))
        assert not isinstance(model.get_input_embeddings().weight, DTensor)


def count_collectives() -> tuple[dict[str, int], dict[str, int]]:
    """Collectives by name in a backward of a language model, whose ranks share rows, and in one of an encoder."""
    model, batch = build("llava")
    spec = build_model_spec(model)
    shard(model, spec)
    stack = model.get_submodule(spec.language_model.stack)
    keep_rows_split(dict(enumerate(stack)), {-1, len(stack) - 1})
    tower = model.model.vision_tower
    outputs = (
        model.model.language_model(batch["input_ids"], use_cache=False).last_hidden_state,
        tower(batch["pixel_values"].flatten(0, -4)).last_hidden_state,
    )
    found = []
    for output in outputs:
        with CommDebugMode() as backward:
            output.sum().backward()
        found.append({str(name): count for name, count in backward.get_comm_counts().items()})
    return tuple(found)


def special_cases() -> tuple[int, set[str], tuple[dict[str, int], dict[str, int]]]:
    """Sharded parameters of adapters, those of which only the second layer is owned, and collectives of backwards."""
    with_odd_words(tied=False)
    with_odd_words(tied=True)
    adapted_words()
    with torch.device("meta"):
        on_meta = tiny.FAMILIES["llava"]()
    shard(on_meta, build_model_spec(on_meta))
    weight = on_meta.model.vision_tower.encoder.layers[0].mlp.fc1.weight
    assert isinstance(weight, DTensor) and weight.is_meta and weight.to_local().shape == (32, 32)
    dora, _ = build("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), dora)
    with pytest.raises(ValueError, match="use_dora=False"):
        shard(dora, build_model_spec(dora))
    part, _ = build("llama")
    shard(part, build_model_spec(part), owned=".layers.1.")
    return (
        with_adapters(),
        {name for name, p in part.named_parameters() if isinstance(p, DTensor)},
        count_collectives(),
    )


@pytest.mark.distributed
def test_adapters_and_only_owned_parameters_before_the_weights_are_read_without_dora():
    counts, sharded, (of_rows, of_sums) = run_distributed(special_cases, 2)[0]
    # The q and v adapters' B and the o, out, fc2 and down adapters' A of each layer, the head's B; features leave the
    # encoder before its last layer
    assert counts == 3 * 4 + 4 * 4 + 1
    names = {name for name, _ in tiny.FAMILIES["llama"]().named_parameters()}
    assert sharded == {name for name in names if ".layers.1." in name and "_proj" in name}
    # Of attention and the feed-forward in each layer: of the gradients of outputs, of those of what they read, and of
    # that itself; and of the gradients of embeddings.
    num_layers = tiny.TEXT["num_hidden_layers"]
    assert of_rows == {"c10d._allgather_base_": 4 * num_layers + 1, "c10d._reduce_scatter_base_": 2 * num_layers}
    assert of_sums == {"c10d.allreduce_": 2 * 4}


def test_a_vector_over_heads_that_no_style_cuts_is_refused():
    """Doge's `A`; it ended the first step with "The size of tensor a (2) must match the size of tensor b (4)"."""
    model = DogeForCausalLM(DogeConfig(**{**tiny.HEADS, "num_hidden_layers": 2}))
    spec = build_model_spec(model)
    with pytest.raises(ValueError, match=r"`model.layers.0.self_attn.A` .* 2 heads"):
        with_tp_dims(model, spec, {"language_model": (2,)})
    with_tp_dims(model, spec)


def cut_names(model: nn.Module) -> set[str]:
    module = with_tp_dims(model, build_model_spec(model), {"language_model": (2,)}).modules["language_model"]
    return {parameter.name for parameter in module.parameters if parameter.tp_dim is not None}


def test_a_feed_forward_that_compares_its_columns_and_layers_that_share_weights_stay_whole():
    sparse = {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.95], "num_kv_shared_layers": 0}
    sizes = {**tiny.HEADS, "num_hidden_layers": 2, "vocab_size_per_layer_input": 64}
    cut = cut_names(Gemma3nForCausalLM(Gemma3nTextConfig(**{**sizes, **sparse})))
    assert {name.split(".")[2] for name in cut if ".self_attn." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in cut if ".mlp." in name} == {"0"}
    hybrid = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "tie_word_embeddings": True}
    assert not any("shared_transf" in name for name in cut_names(ZambaForCausalLM(ZambaConfig(**tiny.TEXT | hybrid))))
