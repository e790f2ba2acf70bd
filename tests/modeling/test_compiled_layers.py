"""Compiled layers: equal to eager ones, with one graph of a structure for rows of all lengths."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from hf_mmparallel.data.packing import PackingCollator
from hf_mmparallel.modeling import build_model_spec, compiled_layers
from hf_mmparallel.modeling.compiled_layers import Compilation, compile_layers
from hf_mmparallel.modeling.prepare import enable_checkpointing
from hf_mmparallel.modeling.spec import layers_of
from hf_mmparallel.modeling.streamed_layers import StreamedLayers
from tests import tiny
from tests.deep_cases import deep

BATCHES = ((0, 2), (2, 5), (5, 9), (9, 11))
"""First and last sample of batches of unlike lengths."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def build(family: str, recomputed: bool = False) -> PreTrainedModel:
    """A model whose language model has bitfield attention."""
    model = tiny.FAMILIES[family]()
    text: Any = model.config.get_text_config()
    text._attn_implementation = "bitfield"
    if recomputed:
        for module in build_model_spec(model).modules.values():
            enable_checkpointing(model, module.tower, module.stack)
    return model.train()


def stacks(model: PreTrainedModel) -> list[list[Any]]:
    return [list(layers_of(model, module.stack)) for module in build_model_spec(model).modules.values()]


def compile_all(model: PreTrainedModel, backend: str = "aot_eager") -> None:
    compile_layers([layer for stack in stacks(model) for layer in stack], Compilation(backend))


def train_and_evaluate(family: str, model: PreTrainedModel) -> list[torch.Tensor]:
    """Losses and gradients of packed batches, and losses without gradients."""
    pack, data = PackingCollator(tiny.collate(family), model), tiny.make_dataset(family, 11)
    batches = [pack(data[first:last]) for first, last in BATCHES]
    found = []
    for batch in batches:
        loss = model.train()(**batch, use_cache=False).loss
        loss.backward()
        found.append(loss.detach())
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        found += [model.eval()(**batch, use_cache=False).loss for batch in batches]
    return found


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: float) -> None:
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, **(tolerance or {"rtol": 0, "atol": 0}))


def with_adapters(recomputed: bool) -> PreTrainedModel:
    model = build("llava", recomputed).requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return inject_adapter_in_model(settings, model)  # type: ignore[return-value, arg-type]


# What is built -> graphs of its two stacks, with gradients and without
CASES: dict[str, tuple[str, Callable[[], PreTrainedModel], int]] = {
    "llava, recomputed": ("llava", lambda: build("llava", recomputed=True), 4),
    # the first layer of each stack has an input that is not trained, unless what is before it is
    "adapters, recomputed": ("llava", lambda: with_adapters(recomputed=True), 5),
    "gemma3, two kinds of attention": ("gemma3", lambda: build("gemma3", recomputed=True), 6),
}


@pytest.mark.parametrize("name", map(deep, CASES))
def test_compiled_layers_equal_eager_ones_in_few_graphs(name: str):
    family, make, num_graphs = CASES[name]
    expected = train_and_evaluate(family, make())
    model = make()
    compile_all(model)
    assert_equal(train_and_evaluate(family, model), expected)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]


@pytest.mark.deep
def test_the_compiler_of_inductor_equals_eager_layers():
    expected = train_and_evaluate("llava", build("llava", recomputed=True))
    model = build("llava", recomputed=True)
    compile_all(model, "inductor")
    assert_equal(train_and_evaluate("llava", model), expected, rtol=2e-5, atol=2e-6)
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.deep
def test_layers_that_are_not_one_graph_run_without_compilation(monkeypatch: pytest.MonkeyPatch):
    """Attention of the encoder of Qwen2.5-VL cuts its rows by lengths that are values of a tensor."""
    warned: list[str] = []
    monkeypatch.setattr(compiled_layers.logger, "warning", warned.append)
    expected = train_and_evaluate("qwen2_5_vl", build("qwen2_5_vl"))
    model = build("qwen2_5_vl")
    compile_all(model)
    assert_equal(train_and_evaluate("qwen2_5_vl", model), expected)
    (sentence,) = warned
    assert sentence.startswith("Layers of `Qwen2_5_VLVisionBlock` run without compilation: ")
    assert counters["stats"]["unique_graphs"] == 2


def streamed(recomputed: bool, compiles: bool) -> list[torch.Tensor]:
    model = with_adapters(recomputed)
    if compiles:
        compile_all(model)
    for stack in stacks(model):
        StreamedLayers(dict(enumerate(stack)), torch.device("cpu"))
    return train_and_evaluate("llava", model)


@pytest.mark.parametrize("recomputed", [deep(False), True])
@pytest.mark.parametrize("compiles", [False, deep(True)])
def test_weights_in_host_memory_reach_each_backward(recomputed: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch):
    """The buffers have the weights of other layers by then, and a device can't compute on those of the host."""
    point_to = StreamedLayers._point_to

    def hide_host(self: StreamedLayers, index: int, values: torch.Tensor) -> None:
        point_to(self, index, torch.full_like(values, 255) if values is self._host.get(index) else values)  # NaN

    monkeypatch.setattr(StreamedLayers, "_point_to", hide_host)
    assert_equal(streamed(recomputed, compiles), train_and_evaluate("llava", with_adapters(recomputed)))
