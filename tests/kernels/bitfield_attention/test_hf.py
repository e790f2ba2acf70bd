"""`attn_implementation="bitfield"`: how it becomes known, and where it must work."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from hf_mmparallel import MultimodalModel, _registration
from hf_mmparallel.kernels.bitfield_attention import attention, encode_words, hf
from tests import tiny
from tests.deep_cases import deep
from tests.kernels.bitfield_attention.hf_models import (
    assert_same,
    build,
    checkpoint,
    multimodal_batch,
    run,
    text_batch,
    words_of,
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A module that stands in for the one with transformers' table, and a list of what was in it at each time."""
    (tmp_path / "host_of_table").mkdir()
    (tmp_path / "host_of_table" / "table.py").write_text("AttentionInterface = object()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_registration, "_TABLE", "host_of_table.table")
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f).__module__ != _registration.__name__])
    found: list[bool] = []

    def register():
        found.append(hasattr(sys.modules["host_of_table.table"], "AttentionInterface"))

    monkeypatch.setattr(hf, "register", register)
    yield found
    for name in ("host_of_table.table", "host_of_table"):
        sys.modules.pop(name, None)


def test_it_is_registered_once_the_table_is_complete(table):
    for _ in range(2):
        _registration.register()
    assert table == []
    module = importlib.import_module("host_of_table.table")
    assert table == [True]
    importlib.reload(module)
    assert table == [True, True]


def test_it_is_registered_at_once_when_the_table_is_there(table):
    importlib.import_module("host_of_table.table")
    _registration.register()
    assert table == [True]


def test_every_way_to_choose_an_attention_takes_it(tmp_path):
    model = tiny.FAMILIES["llava"]()
    model.save_pretrained(tmp_path)
    chosen = {"text_config": "bitfield", "vision_config": "sdpa"}
    for made in (
        LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=chosen),
        AutoModelForImageTextToText.from_config(model.config, attn_implementation=chosen),
    ):
        assert made.config.text_config._attn_implementation == "bitfield"
        assert made.config.vision_config._attn_implementation == "sdpa"
        made.set_attn_implementation({"text_config": "eager", "vision_config": "bitfield"})
        assert made.config.text_config._attn_implementation == "eager"
        assert made.config.vision_config._attn_implementation == "bitfield"
        made.set_attn_implementation("bitfield")
        assert made.model.language_model.config._attn_implementation == "bitfield"
        assert made.model.vision_tower.config._attn_implementation == "bitfield"
    config = tiny.FAMILIES["llama"]().config
    config._attn_implementation = "bitfield"
    assert LlamaForCausalLM(config).model.config._attn_implementation == "bitfield"
    made = AutoModelForCausalLM.from_config(config, attn_implementation="bitfield", dtype=torch.bfloat16)
    assert made.model.layers[0].self_attn.config._attn_implementation == "bitfield"


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3"])
def test_activation_checkpointing(family, use_reentrant):
    model = build(family)
    batch = multimodal_batch(family) if family == "gemma3" else text_batch()
    expected = run(model, batch, "eager")
    checkpoint(model, use_reentrant)
    assert_same(run(model, batch, "bitfield", attention_words=words_of(family, batch)), expected)
    assert_same(run(model, batch, "bitfield"), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_autocast(family):
    model, batch = build(family), text_batch()
    exact = run(model, batch, "eager")[1]
    with torch.autocast("cpu", torch.bfloat16):
        eager = run(model, batch, "eager")[1]
        found = run(model, batch, "bitfield", attention_words=words_of(family, batch))[1]
    assert found.dtype == eager.dtype
    assert (found - exact).norm() <= 1.5 * (eager - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    model, batch = build("llama"), text_batch()
    exact = run(model, batch, "eager")[1]
    model.to(dtype)
    eager = run(model, batch, "eager")[1]
    found = run(model, batch, "bitfield", attention_words=words_of("llama", batch))[1]
    assert (found - exact).norm() <= 1.5 * (eager - exact).norm()


@pytest.mark.parametrize("family", ["gemma2", deep("gpt_oss"), deep("gemma3")])
def test_the_kernels_under_a_model(family, monkeypatch):
    model = build(family)
    batch = multimodal_batch(family) if family == "gemma3" else text_batch()
    expected = run(model, batch, "eager")
    monkeypatch.setattr(attention, "default_backend", lambda query: "triton")
    assert_same(run(model, batch, "bitfield", attention_words=words_of(family, batch)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3", "qwen2_vl"])
def test_the_kernels_under_a_model_on_a_gpu(family):
    model = build(family)
    batch = multimodal_batch(family) if family in ("gemma3", "qwen2_vl") else text_batch()
    words = words_of(family, batch).cuda()
    exact = run(model, batch, "eager")[1]
    model.cuda()
    batch = {name: value.cuda() for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        eager = run(model, batch, "eager")[1].cpu()
        found = run(model, batch, "bitfield", attention_words=words)[1].cpu()
    assert (found - exact).norm() <= 1.5 * (eager - exact).norm()


def _compiled(model: torch.nn.Module, graphs: list[torch.fx.GraphModule]) -> torch.nn.Module:
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False)


def _quadratic_nodes(graphs: list[torch.fx.GraphModule], length: int) -> list[str]:
    """The nodes of graphs whose results have an entry for each pair of tokens."""
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    values = [(node.name, node.meta.get("example_value")) for node in nodes]
    return [name for name, value in values if getattr(value, "shape", ())[-2:] == (length, length)]


@pytest.mark.deep
@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("gemma2", True)])
def test_compiling_in_one_graph(family, checkpointing):
    model, batch = build(family), text_batch(length=19)
    words = words_of(family, batch)
    expected = run(model, batch, "eager")
    if checkpointing:
        checkpoint(model, use_reentrant=False)
    graphs: list[torch.fx.GraphModule] = []
    model.set_attn_implementation("bitfield")
    model.train().zero_grad()
    compiled = _compiled(model, graphs)
    output = compiled(**batch, attention_words=words, use_cache=False)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    real = batch["attention_mask"].bool()
    assert_same((output.loss.detach(), output.logits.detach()[real], gradients), expected)
    assert len(graphs) == 1 and _quadratic_nodes(graphs, 19) == []
    if not checkpointing:
        model.eval()
        torch.testing.assert_close(compiled(**batch).logits[real], output.logits[real], rtol=0, atol=1e-5)
        assert _quadratic_nodes(graphs, 19)


def test_a_model_composed_of_others():
    model = MultimodalModel.from_unimodal(
        encoders={"vision": SiglipVisionConfig(**tiny.SIGLIP)},
        language_model=LlamaConfig(**tiny.TEXT),
        token_ids={"vision": tiny.MEDIA_TOKEN},
    )
    batch = multimodal_batch("llava")
    expected = run(model, batch, "eager")
    assert_same(run(model, batch, "bitfield", attention_words=words_of("llava", batch)), expected)
    with pytest.raises(ValueError, match="neither"):
        run(model, {name: value for name, value in batch.items() if name != "attention_mask"}, "bitfield")


def test_words_of_samples_keep_them_apart():
    model, batch = build("llama"), text_batch(rows=1, length=10)
    batch["attention_mask"] = torch.ones(1, 10, dtype=torch.int64)
    words = encode_words(torch.tensor([[1] * 4 + [2] * 6]))
    before = run(model, batch, "bitfield", attention_words=words)[1]
    batch["input_ids"][:, :4] = 5
    after = run(model, batch, "bitfield", attention_words=words)[1]
    assert after[4:].equal(before[4:]) and not after[:4].equal(before[:4])
