"""The words of a batch are the masks that the layers of each model really get."""

import copy
import linecache
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_masks_for_generate,
    sdpa_mask,
)

from hf_mmparallel.data.mask_rules import MaskRule, words_of_batch
from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, decode_words, dense_mask
from tests import tiny
from tests.deep_cases import third

from .conversations import left_padded

FAMILIES = ["llama", "llava", "gemma3", "paligemma", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def masks_of_layers(model: Any, batch: dict[str, Tensor]) -> list[tuple[Tensor, int]]:
    """The mask `[batch, length, length]` and the window of each layer of the language model, in a forward."""
    seen: list[tuple[Tensor, int]] = []

    def attend(module: Any, query: Tensor, key: Any, value: Any, mask: Tensor, sliding_window: Any = None, **_: Any):
        seen.append((mask[:, 0], sliding_window or 0))
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None

    def whole_mask(**arguments: Any) -> Tensor | None:
        arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(**arguments)

    AttentionInterface.register("listening", attend)
    AttentionMaskInterface.register("listening", whole_mask)
    tiny.attending(model, "listening")(**{name: value for name, value in batch.items() if name != "labels"})
    return seen


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", third(FAMILIES))
@torch.no_grad()
def test_words_are_the_masks_that_layers_get(family: str, side: str):
    model = tiny.FAMILIES[family]()
    batch = tiny.collate(family)(tiny.make_dataset(family, 5, seed=torch.seed() % 1000))
    batch = left_padded(batch) if side == "left" else batch
    mask = BitfieldMask.from_words(words_of_batch(model, batch))
    real = batch["attention_mask"].bool()
    layers = masks_of_layers(model, batch)
    assert len(layers) == tiny.NUM_LAYERS
    assert len({window for _, window in layers}) == (2 if family == "gemma3" else 1)
    for wanted, window in layers:
        got = dense_mask(mask, window)
        assert torch.equal(got[real], (wanted & real[:, None])[real])
        assert not got[~real].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_what_its_model_says_in_another_process_and_under_any_default_device(family: str):
    model = tiny.FAMILIES[family]()
    batch = tiny.collate(family)(tiny.make_dataset(family, 4))
    words = MaskRule(model)(batch)
    rule = pickle.loads(pickle.dumps(MaskRule(model.config)))
    with torch.device("meta"):
        assert torch.equal(rule(batch), words)
    assert model.config.get_text_config()._attn_implementation != rule.config.get_text_config()._attn_implementation


def spans_of(model: Any, batch: dict[str, Tensor]) -> list[list[int]]:
    return decode_words(words_of_batch(model, batch)).span.tolist()


def adjacent_images() -> dict[str, Tensor]:
    """Text, two images of four tokens without anything between, text."""
    ids = torch.tensor([[1, 2, *[tiny.MEDIA_TOKEN] * 8, 3, 4]])
    kinds = (ids == tiny.MEDIA_TOKEN).long()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": kinds,
        "mm_token_type_ids": kinds,
    }


def test_neighbouring_images_are_two_spans_where_transformers_makes_one():
    batch = adjacent_images()
    assert spans_of(tiny.FAMILIES["gemma3"](), batch) == [[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]]
    blocks = transformers.models.gemma3.modeling_gemma3.get_block_sequence_ids_for_mask(batch["token_type_ids"])
    assert blocks.tolist() == [[-1, -1, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1]]


def looking(masks: Callable[..., Any]) -> Any:
    """A model of the Qwen family whose masks are these."""
    members = {"create_masks_for_generate": staticmethod(masks)}
    with torch.device("meta"):
        config = copy.deepcopy(tiny.FAMILIES["qwen2_vl"]().config)
        return type("Looking", (transformers.Qwen2VLForConditionalGeneration,), members)(config)


def in_blocks(config: Any, blocks: Tensor, **known: Any) -> Any:
    return create_masks_for_generate(config.get_text_config(), block_sequence_ids=blocks, **known)


def each_image(config: Any, mm_token_type_ids: Tensor, **known: Any) -> Any:
    image = mm_token_type_ids == 1
    starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
    return in_blocks(config, torch.where(image, starts.int().cumsum(-1), -1), **known)


def all_images(config: Any, mm_token_type_ids: Tensor, **known: Any) -> Any:
    return in_blocks(config, torch.where(mm_token_type_ids == 1, 0, -1), **known)


def the_prompt(config: Any, token_type_ids: Tensor, **known: Any) -> Any:
    return in_blocks(config, torch.where(token_type_ids == 0, 0, -1), **known)


def a_window_to_both_sides(config: Any, **known: Any) -> Any:
    text = copy.deepcopy(config.get_text_config())
    text.sliding_window = 6
    return create_bidirectional_sliding_window_mask(config=text, **known)


def not_the_token_before(config: Any, **known: Any) -> Any:
    other = lambda batch, head, query, key: key != query - 1  # noqa: E731
    return create_causal_mask(config.get_text_config(), and_mask_function=other, **known)


def ahead_in_some_layers(config: Any, mm_token_type_ids: Tensor, **known: Any) -> Any:
    plain: Any = create_masks_for_generate(config.get_text_config(), **known)
    return {**plain, "sliding_attention": all_images(config, mm_token_type_ids, **known)["full_attention"]}


def test_grids_say_where_an_image_ends():
    batch, model = adjacent_images(), looking(each_image)
    assert spans_of(model, batch) == [[0, 0, *[1] * 8, 0, 0]]
    grids = torch.tensor([[1, 4, 2], [1, 4, 4], [1, 2, 4]])
    assert spans_of(model, {**batch, "image_grid_thw": grids}) == [[0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0]]


def test_images_that_look_at_each_other_share_a_span():
    batch, model = tiny.collate("qwen2_vl")(tiny.make_dataset("qwen2_vl", 2)), looking(all_images)
    assert spans_of(model, batch) == batch["mm_token_type_ids"].tolist()
    single = torch.zeros_like(batch["mm_token_type_ids"])
    single[0, [2, 5, 6, 9]] = 1  # the first and last are alone in their runs
    assert spans_of(model, {**batch, "mm_token_type_ids": single}) == single.tolist()


def test_a_prompt_of_images_and_text_is_one_span():
    batch = {**adjacent_images(), "token_type_ids": torch.tensor([[0] * 11 + [1]])}
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    assert spans_of(looking(the_prompt), batch) == [[1] * 11 + [0]]


@pytest.mark.parametrize(
    ("masks", "what"),
    [
        (ahead_in_some_layers, "differ between its layers in more than a window"),
        (a_window_to_both_sides, "have windows that look ahead"),
        (not_the_token_before, "are not causal"),
    ],
)
def test_masks_that_a_word_cannot_say_are_refused(masks: Callable[..., Any], what: str):
    batch = tiny.collate("qwen2_vl")(tiny.make_dataset("qwen2_vl", 2))
    with pytest.raises(ValueError, match=f"`Looking` {what}"):
        words_of_batch(looking(masks), batch)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Mamba2Config", {}, "`Mamba2ForCausalLM.*mask functions"),
        ("RwkvConfig", {}, "`RwkvForCausalLM` has recurrent layers"),
        ("T5Config", {}, "encoder and a decoder"),
        ("MllamaConfig", {}, "images outside the row"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "looks ahead everywhere"),
        ("GitConfig", {}, "`GitForCausalLM` draws a mask in its forward"),
        ("BertConfig", {}, "`BertLMHeadModel` looks ahead everywhere"),
        ("RobertaConfig", {"is_decoder": True}, "`RobertaForCausalLM` counts its positions"),
    ],
)
def test_models_whose_samples_cannot_share_a_row_are_refused(name: str, settings: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        MaskRule(getattr(transformers, name)(**settings))


def make_up(monkeypatch: pytest.MonkeyPatch, family: str, source: str, is_readable: bool = True) -> Any:
    """A model of a class `Own` in a module of its own, as code from the Hub makes it."""
    text = f"class Own(base):\n    {source}\n"
    module = types.ModuleType("from_the_hub")
    monkeypatch.setitem(sys.modules, "from_the_hub", module)
    vars(module).update(base=getattr(transformers, f"{family}ForCausalLM"))
    if is_readable:
        lines = (len(text), None, text.splitlines(True), "<from_the_hub>")
        monkeypatch.setitem(linecache.cache, "<from_the_hub>", lines)
        vars(module).update(__file__="<from_the_hub>")
    exec(compile(text, "<from_the_hub>", "exec"), vars(module))
    with torch.device("meta"):
        return vars(module)["Own"](getattr(transformers, f"{family}Config")(num_hidden_layers=1))


FORWARD = "def forward(self, **batch): return super().forward({})"


@pytest.mark.parametrize(
    ("family", "source"),
    [
        ("Llama", FORWARD.format("or_mask_function=None")),
        ("Llama", FORWARD.format("and_mask_function=None")),
        ("Llama", FORWARD.format("block_sequence_ids=None")),
        ("Git", "pass"),  # which draws one itself
    ],
)
def test_classes_of_others_that_draw_masks_of_their_own_are_refused(monkeypatch, family: str, source: str):
    with pytest.raises(ValueError, match="`Own` draws a mask in its forward"):
        MaskRule(make_up(monkeypatch, family, source))


@pytest.mark.parametrize("is_readable", [True, False])
def test_classes_that_draw_none_are_what_they_inherit_from(monkeypatch: pytest.MonkeyPatch, is_readable: bool):
    rule = MaskRule(make_up(monkeypatch, "Llama", FORWARD.format("**batch"), is_readable))
    batch = tiny.collate("llama")(tiny.make_dataset("llama", 2))
    assert rule.name == "Own" and torch.equal(rule(batch) != 0, batch["attention_mask"] == 1)


def test_a_config_of_no_known_class_is_refused():
    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own"

    with pytest.raises(ValueError, match="`OwnConfig`"):
        MaskRule(OwnConfig())


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_wrapped_model_has_the_masks_of_its_own_class(wrap: Any):
    model = tiny.FAMILIES["gemma3"]()
    batch = tiny.collate("gemma3")(tiny.make_dataset("gemma3", 3))
    assert torch.equal(words_of_batch(wrap(model), batch), words_of_batch(model, batch))


def test_rows_without_tokens_and_rows_of_one_token_are_served():
    ids = torch.tensor([[5, 0, 0], [0, 0, 0], [tiny.MEDIA_TOKEN, tiny.MEDIA_TOKEN, 7], [0, 9, 8]])
    kinds = (ids == tiny.MEDIA_TOKEN).long()
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": kinds}
    fields = decode_words(words_of_batch(tiny.FAMILIES["gemma3"](), batch))
    assert torch.equal(fields.segment, (ids > 0).long())
    assert fields.span.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    none = {name: value[1:2] for name, value in batch.items()}
    assert not words_of_batch(tiny.FAMILIES["gemma3"](), none).any()


ONES = torch.ones(1, 4).long()


def test_masks_that_are_not_drawn_by_transformers_are_refused():
    rule = MaskRule(transformers.BloomConfig())
    with pytest.raises(ValueError, match="`BloomForCausalLM.create_masks_for_generate`"):
        rule({"input_ids": ONES, "attention_mask": ONES})


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 4, 4)])
def test_a_batch_that_does_not_say_what_is_padding_is_refused(mask: Any):
    with pytest.raises(ValueError, match=r"`attention_mask`.* \(1, 4\)"):
        MaskRule(tiny.FAMILIES["llama"]())({"input_ids": ONES, "attention_mask": mask})
