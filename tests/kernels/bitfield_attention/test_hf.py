"""`attn_implementation="bitfield"`: how it becomes known, and models against themselves under eager attention."""

import contextlib
import importlib
import sys

import pytest
import torch
import transformers

from hf_mmparallel import MultimodalModel, _registration
from hf_mmparallel.kernels.bitfield_attention import attention, encode_words, hf
from tests import tiny
from tests.deep_cases import deep

from .hf_models import (
    MULTIMODAL,
    TEXT,
    assert_same,
    batch_of,
    build,
    checkpoint,
    padded_left,
    run,
    text_batch,
    words_of,
)

FAMILIES = (*TEXT, *MULTIMODAL)


def test_it_is_registered_whenever_the_table_of_transformers_is_complete(tmp_path, monkeypatch):
    (tmp_path / "host_of_table").mkdir()
    (tmp_path / "host_of_table" / "table.py").write_text("AttentionInterface = object()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_registration, "_TABLE", "host_of_table.table")
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f).__module__ != _registration.__name__])
    complete: list[bool] = []
    monkeypatch.setattr(hf, "register", lambda: complete.append(hasattr(sys.modules[name], "AttentionInterface")))
    name = "host_of_table.table"
    for _ in range(2):
        _registration.register()
    assert complete == []
    module = importlib.import_module(name)
    assert complete == [True]
    importlib.reload(module)
    assert complete == [True, True]
    _registration.register()
    assert complete == [True, True, True]
    for imported in (name, "host_of_table"):
        del sys.modules[imported]


def test_every_way_to_choose_an_attention_takes_it(tmp_path):
    model = tiny.FAMILIES["llava"]()
    model.save_pretrained(tmp_path)

    def chosen(made):
        return tuple(part.config._attn_implementation for part in (made.model.language_model, made.model.vision_tower))

    parts = {"text_config": "bitfield", "vision_config": "sdpa"}
    for made in (
        transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=parts),
        transformers.AutoModelForImageTextToText.from_config(model.config, attn_implementation=parts),
    ):
        assert chosen(made) == ("bitfield", "sdpa")
        made.set_attn_implementation({"text_config": "eager", "vision_config": "bitfield"})
        assert chosen(made) == ("eager", "bitfield")
        made.set_attn_implementation("bitfield")
        assert chosen(made) == ("bitfield", "bitfield")
    config = tiny.FAMILIES["llama"]().config
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="bitfield", dtype=torch.bfloat16)
    config._attn_implementation = "bitfield"
    for model in (made, transformers.LlamaForCausalLM(config)):
        assert model.model.layers[0].self_attn.config._attn_implementation == "bitfield"


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_and_evaluates_as_under_eager_attention(family):
    model, batch = build(family), batch_of(family)
    expected = run(model, batch, "eager")
    assert_same(run(model, batch, "bitfield", attention_words=words_of(family, batch)), expected)
    assert_same(run(model, batch, "bitfield"), expected)
    unmasked = {name: value for name, value in batch.items() if name not in ("attention_mask", "labels")}
    logits = {}
    for name in ("eager", "bitfield"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(**unmasked).logits
    torch.testing.assert_close(logits["bitfield"], logits["eager"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache(family):
    model, batch = build(family), padded_left(batch_of(family))
    batch.pop("labels")
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    if FAMILIES.index(family) % 2:
        settings["cache_implementation"] = "static"
    model.set_attn_implementation("eager")
    expected = model.generate(**batch, **settings)
    model.set_attn_implementation("bitfield")
    assert model.generate(**batch, **settings).equal(expected)
    assert expected.shape[1] == batch["input_ids"].shape[1] + 8


@pytest.mark.parametrize("family", TEXT)
def test_a_packed_row_trains_as_its_samples_do(family):
    model, batch = build(family), text_batch()
    expected = run(model, batch, "eager")
    real = batch["attention_mask"].bool()
    row, column = real.nonzero(as_tuple=True)
    packed = {"input_ids": batch["input_ids"][real][None], "position_ids": column[None]}
    packed["labels"] = batch["labels"][real].masked_fill(column == 0, -100)[None]
    words = encode_words(row[None] + 1)
    assert_same(run(model, packed, "bitfield", attention_words=words), (expected[0], expected[1][None], expected[2]))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3"])
def test_activation_checkpointing(family, use_reentrant):
    model, batch = build(family), batch_of(family)
    expected = run(model, batch, "eager")
    checkpoint(model, use_reentrant)
    assert_same(run(model, batch, "bitfield", attention_words=words_of(family, batch)), expected)
    assert_same(run(model, batch, "bitfield"), expected)


def _assert_as_exact_as_eager(family: str, dtype: torch.dtype, device: str = "cpu", autocast: bool = True) -> None:
    """Judged against float32: at most 1.5 times the error of eager attention in that dtype."""
    model, batch = build(family), batch_of(family)
    words = words_of(family, batch).to(device)
    exact = run(model, batch, "eager")[1]
    model.to(device, None if autocast else dtype)
    batch = {name: value.to(device) for name, value in batch.items()}
    with torch.autocast(device, dtype) if autocast else contextlib.nullcontext():
        eager = run(model, batch, "eager")[1].cpu()
        found = run(model, batch, "bitfield", attention_words=words)[1].cpu()
    assert found.dtype == eager.dtype
    assert (found - exact).norm() <= 1.5 * (eager - exact).norm()


@pytest.mark.parametrize(
    ("family", "dtype", "autocast"),
    [
        *((family, torch.bfloat16, True) for family in ("llama", "gemma2", "gpt_oss")),
        *(("llama", dtype, False) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_low_precision(family, dtype, autocast):
    _assert_as_exact_as_eager(family, dtype, autocast=autocast)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3", "qwen2_vl"])
def test_the_kernels_under_a_model_on_a_gpu(family):
    _assert_as_exact_as_eager(family, torch.bfloat16, "cuda")


@pytest.mark.parametrize("family", ["gemma2", deep("gpt_oss")])
def test_the_kernels_under_a_model(family, monkeypatch):
    model, batch = build(family), text_batch(rows=1)
    expected = run(model, batch, "eager")
    monkeypatch.setattr(attention, "default_backend", lambda query: "triton")
    assert_same(run(model, batch, "bitfield", attention_words=words_of(family, batch)), expected)


def _quadratic_nodes(graphs: list[torch.fx.GraphModule], length: int) -> list[str]:
    """The nodes of graphs whose results have an entry for each pair of tokens."""
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    values = [(node.name, node.meta.get("example_value")) for node in nodes]
    return [name for name, value in values if getattr(value, "shape", ())[-2:] == (length, length)]


@pytest.mark.deep
@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("gemma2", True)])
def test_compiling_in_one_graph(family, checkpointing):
    from torch._dynamo.backends.debugging import aot_eager

    model, batch = build(family), text_batch(length=19)
    words = words_of(family, batch)
    expected = run(model, batch, "eager")
    if checkpointing:
        checkpoint(model, use_reentrant=False)
    graphs: list[torch.fx.GraphModule] = []
    model.set_attn_implementation("bitfield")
    model.train().zero_grad()
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
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
        encoders={"vision": transformers.SiglipVisionConfig(**tiny.SIGLIP)},
        language_model=transformers.LlamaConfig(**tiny.TEXT),
        token_ids={"vision": tiny.MEDIA_TOKEN},
    )
    batch = batch_of("llava")
    expected = run(model, batch, "eager")
    assert_same(run(model, batch, "bitfield", attention_words=words_of("llava", batch)), expected)
    with pytest.raises(ValueError, match="neither"):
        run(model, {name: value for name, value in batch.items() if name != "attention_mask"}, "bitfield")
