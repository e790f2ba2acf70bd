"""The words of a batch are the masks that the layers of each model really get."""

from __future__ import annotations

import copy
import linecache
import pickle
import sys
import types
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

LISTENING = "listening"
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

    AttentionInterface.register(LISTENING, attend)
    AttentionMaskInterface.register(LISTENING, whole_mask)
    keys = [key for key in model.config.sub_configs if getattr(model.config, key) is model.config.get_text_config()]
    model.set_attn_implementation({keys[0] if keys else "": LISTENING})
    model(**{name: value for name, value in batch.items() if name != "labels"})
    return seen


def left_padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its padding in front."""
    moved = dict(batch)
    for name in ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in batch:
            rows = [
                row.roll(int((mask == 0).sum()))
                for row, mask in zip(batch[name], batch["attention_mask"], strict=True)
            ]
            moved[name] = torch.stack(rows)
    return moved


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
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


def test_each_image_of_gemma3_is_a_span_and_the_prefix_of_paligemma_is_one():
    gemma3 = tiny.collate("gemma3")(tiny.make_dataset("gemma3", 2))
    spans = decode_words(words_of_batch(tiny.FAMILIES["gemma3"](), gemma3)).span
    assert spans.unique().tolist() == [0, 1, 2]
    assert torch.equal(spans > 0, gemma3["token_type_ids"] == 1)
    paligemma = tiny.collate("paligemma")(tiny.make_dataset("paligemma", 2))
    spans = decode_words(words_of_batch(tiny.FAMILIES["paligemma"](), paligemma)).span
    assert torch.equal(spans > 0, (paligemma["token_type_ids"] == 0) & (paligemma["attention_mask"] == 1))
    assert spans.max() == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_what_its_model_says_in_another_process_too(family: str):
    model = tiny.FAMILIES[family]()
    batch = tiny.collate(family)(tiny.make_dataset(family, 4))
    words = MaskRule(model)(batch)
    rule = pickle.loads(pickle.dumps(MaskRule(model.config)))
    assert torch.equal(rule(batch), words)
    assert model.config.get_text_config()._attn_implementation != rule.config.get_text_config()._attn_implementation


def adjacent_images(num_tokens: int) -> dict[str, Tensor]:
    """Text, two images of four tokens without anything between, text."""
    ids = torch.tensor([[1, 2, *[tiny.MEDIA_TOKEN] * num_tokens, 3, 4]])
    types = (ids == tiny.MEDIA_TOKEN).long()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": types,
        "mm_token_type_ids": types,
    }


def test_neighbouring_images_are_two_spans_where_transformers_makes_one():
    model = tiny.FAMILIES["gemma3"]()
    batch = adjacent_images(8)
    words = words_of_batch(model, batch)
    assert decode_words(words).span.tolist() == [[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]]
    blocks = transformers.models.gemma3.modeling_gemma3.get_block_sequence_ids_for_mask(batch["token_type_ids"])
    assert blocks.tolist() == [[-1, -1, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1]]


class Looking(transformers.Qwen2VLForConditionalGeneration):
    """A model of the Qwen family whose images look at themselves both ways."""

    @staticmethod
    def create_masks_for_generate(config: Any, mm_token_type_ids: Tensor, **known: Any) -> Any:
        image = mm_token_type_ids == 1
        starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
        blocks = torch.where(image, starts.int().cumsum(-1), -1)
        return create_masks_for_generate(config.get_text_config(), block_sequence_ids=blocks, **known)


class LookingTogether(transformers.Qwen2VLForConditionalGeneration):
    """A model of the Qwen family all of whose images look at each other."""

    @staticmethod
    def create_masks_for_generate(config: Any, mm_token_type_ids: Tensor, **known: Any) -> Any:
        blocks = torch.where(mm_token_type_ids == 1, 0, -1)
        return create_masks_for_generate(config.get_text_config(), block_sequence_ids=blocks, **known)


class LookingAtThePrompt(transformers.Qwen2VLForConditionalGeneration):
    """A model of the Qwen family whose prompt, images and text, is seen both ways."""

    @staticmethod
    def create_masks_for_generate(config: Any, token_type_ids: Tensor, **known: Any) -> Any:
        blocks = torch.where(token_type_ids == 0, 0, -1)
        return create_masks_for_generate(config.get_text_config(), block_sequence_ids=blocks, **known)


class LookingInAWindow(transformers.Qwen2VLForConditionalGeneration):
    """A model that looks to both sides, but not far."""

    @staticmethod
    def create_masks_for_generate(config: Any, **known: Any) -> Any:
        text = copy.deepcopy(config.get_text_config())
        text.sliding_window = 6
        return create_bidirectional_sliding_window_mask(config=text, **known)


class SkippingOne(transformers.Qwen2VLForConditionalGeneration):
    """A model that does not see the token before."""

    @staticmethod
    def create_masks_for_generate(config: Any, **known: Any) -> Any:
        other = lambda batch, head, query, key: key != query - 1  # noqa: E731
        return create_causal_mask(config.get_text_config(), and_mask_function=other, **known)


class LookingByLayer(transformers.Qwen2VLForConditionalGeneration):
    """A model whose layers do not agree on who looks ahead."""

    @staticmethod
    def create_masks_for_generate(config: Any, mm_token_type_ids: Tensor, **known: Any) -> Any:
        text = config.get_text_config()
        blocks = torch.where(mm_token_type_ids == 1, 0, -1)
        plain: Any = create_masks_for_generate(text, **known)
        other: Any = create_masks_for_generate(text, block_sequence_ids=blocks, **known)
        return {"full_attention": plain["full_attention"], "sliding_attention": other["full_attention"]}


def qwen(cls: type) -> Any:
    with torch.device("meta"):
        return cls(copy.deepcopy(tiny.FAMILIES["qwen2_vl"]().config))


def test_grids_say_where_an_image_ends():
    batch = {**adjacent_images(8), "image_grid_thw": torch.tensor([[1, 4, 2], [1, 4, 4], [1, 2, 4]])}
    spans = decode_words(words_of_batch(qwen(Looking), batch)).span
    assert spans.tolist() == [[0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0]]
    without = {name: value for name, value in batch.items() if name != "image_grid_thw"}
    spans = decode_words(words_of_batch(qwen(Looking), without)).span
    assert spans.tolist() == [[0, 0, *[1] * 8, 0, 0]]


def test_images_that_look_at_each_other_share_a_span():
    batch = tiny.collate("qwen2_vl")(tiny.make_dataset("qwen2_vl", 2))
    spans = decode_words(words_of_batch(qwen(LookingTogether), batch)).span
    assert torch.equal(spans, batch["mm_token_type_ids"].long())
    single = {**batch, "mm_token_type_ids": torch.zeros_like(batch["mm_token_type_ids"])}
    single["mm_token_type_ids"][0, [2, 5, 6, 9]] = 1  # the first and last are alone in their runs
    spans = decode_words(words_of_batch(qwen(LookingTogether), single)).span
    assert torch.equal(spans, single["mm_token_type_ids"].long())


def test_a_prompt_of_images_and_text_is_one_span():
    batch = {**adjacent_images(8), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    batch["token_type_ids"] = torch.tensor([[0] * 11 + [1]])
    spans = decode_words(words_of_batch(qwen(LookingAtThePrompt), batch)).span
    assert spans.tolist() == [[1] * 11 + [0]]


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (LookingByLayer, "differ between its layers in more than a window"),
        (LookingInAWindow, "have windows that look ahead"),
        (SkippingOne, "are not causal"),
    ],
)
def test_masks_that_a_word_cannot_say_are_refused(cls: type, what: str):
    batch = tiny.collate("qwen2_vl")(tiny.make_dataset("qwen2_vl", 2))
    with pytest.raises(ValueError, match=f"`{cls.__name__}` {what}, which mask words can't express.* without packing"):
        words_of_batch(qwen(cls), batch)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Llama4TextConfig", {}, "`Llama4ForCausalLM` has `chunked_attention`: one word a token"),
        ("Qwen3NextConfig", {}, "`Qwen3NextForCausalLM` has `linear_attention`"),
        ("RwkvConfig", {}, "`RwkvForCausalLM` has recurrent layers"),
        ("T5Config", {}, "is an encoder and a decoder"),
        ("MllamaConfig", {}, "has layers that look at images outside the row"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "looks ahead everywhere"),
        ("GitConfig", {}, "`GitForCausalLM` draws a mask in its forward"),
        ("BertConfig", {}, "`BertLMHeadModel` looks ahead everywhere"),
        (
            "RobertaConfig",
            {"is_decoder": True},
            "`RobertaForCausalLM` counts its positions from the id",
        ),
    ],
)
def test_models_whose_samples_cannot_share_a_row_are_refused(name: str, settings: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=f"{reason}.* without packing"):
        MaskRule(getattr(transformers, name)(**settings))


def make_up(monkeypatch: pytest.MonkeyPatch, base: type, source: str = "") -> type:
    """The class `Own(base)` in a module of its own, as code from the Hub makes it; its source can be read."""
    text = f"class Own(base):\n    pass\n{source}"
    module = types.ModuleType("from_the_hub")
    monkeypatch.setitem(sys.modules, "from_the_hub", module)
    monkeypatch.setitem(linecache.cache, "<from_the_hub>", (len(text), None, text.splitlines(True), "<from_the_hub>"))
    vars(module).update(base=base, __file__="<from_the_hub>")
    exec(compile(text, "<from_the_hub>", "exec"), vars(module))
    return vars(module)["Own"]


@pytest.mark.parametrize("argument", ["or_mask_function", "and_mask_function", "block_sequence_ids"])
def test_classes_of_others_that_draw_masks_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch, argument: str):
    drawing = f"    def forward(self, **batch):\n        return super().forward({argument}=None)\n"
    own = make_up(monkeypatch, transformers.LlamaForCausalLM, drawing)
    with torch.device("meta"):
        model = own(tiny.FAMILIES["llama"]().config)
    with pytest.raises(ValueError, match="`Own` draws a mask in its forward .* without packing"):
        MaskRule(model)


def test_classes_are_what_they_inherit_from(monkeypatch: pytest.MonkeyPatch):
    with torch.device("meta"):
        plain = make_up(monkeypatch, transformers.LlamaForCausalLM)(tiny.FAMILIES["llama"]().config)
        drawing = make_up(monkeypatch, transformers.GitForCausalLM)(transformers.GitConfig(num_hidden_layers=1))
    assert MaskRule(plain).name == "Own"
    with pytest.raises(ValueError, match="`Own` draws a mask in its forward"):
        MaskRule(drawing)


def test_a_config_of_no_known_class_is_refused():
    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own"

    with pytest.raises(ValueError, match="`OwnConfig` is the config of no class .* Give the model itself"):
        MaskRule(OwnConfig())


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_wrapped_model_has_the_masks_of_its_own_class(wrap: Any):
    model = tiny.FAMILIES["gemma3"]()
    batch = tiny.collate("gemma3")(tiny.make_dataset("gemma3", 3))
    assert torch.equal(words_of_batch(wrap(model), batch), words_of_batch(model, batch))


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "qwen2_vl"])
def test_words_are_made_where_the_batch_is_whatever_the_default_device(family: str):
    batch = tiny.collate(family)(tiny.make_dataset(family, 3))
    rule = MaskRule(tiny.FAMILIES[family]())
    wanted = rule(batch)
    with torch.device("meta"):
        assert torch.equal(rule(batch), wanted)


def test_rows_without_tokens_and_rows_of_one_token_are_served():
    ids = torch.tensor([[5, 0, 0], [0, 0, 0], [tiny.MEDIA_TOKEN, tiny.MEDIA_TOKEN, 7], [0, 9, 8]])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "token_type_ids": (ids == tiny.MEDIA_TOKEN).long(),
    }
    fields = decode_words(words_of_batch(tiny.FAMILIES["gemma3"](), batch))
    assert torch.equal(fields.segment, (ids > 0).long())
    assert fields.span.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    none = {name: value[1:2] for name, value in batch.items()}
    assert not words_of_batch(tiny.FAMILIES["gemma3"](), none).any()


def test_a_class_without_source_is_served(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("made_up")
    monkeypatch.setitem(sys.modules, "made_up", module)
    vars(module)["base"] = transformers.LlamaForCausalLM
    exec("class Own(base):\n    def forward(self, **batch):\n        return super().forward(**batch)", vars(module))
    with torch.device("meta"):
        model = vars(module)["Own"](tiny.FAMILIES["llama"]().config)
    batch = tiny.collate("llama")(tiny.make_dataset("llama", 2))
    assert torch.equal(MaskRule(model)(batch) != 0, batch["attention_mask"] == 1)


def test_masks_that_are_not_drawn_by_transformers_are_refused():
    rule = MaskRule(transformers.BloomConfig())
    with pytest.raises(
        ValueError, match=r"`BloomForCausalLM.create_masks_for_generate` does not use .* without packing"
    ):
        rule({"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 4).long()})


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 4, 4)])
def test_a_batch_that_does_not_say_what_is_padding_is_refused(mask: Any):
    rule = MaskRule(tiny.FAMILIES["llama"]())
    with pytest.raises(ValueError, match=r"`attention_mask`.*, so padding can't be told .*\(1, 4\)"):
        rule({"input_ids": torch.ones(1, 4).long(), "attention_mask": mask})
