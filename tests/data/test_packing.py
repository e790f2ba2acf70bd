"""A packed row trains as the padded batch does: losses and gradients, for each family of models."""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import shrunk_models
import torch
from torch import Tensor, nn

from hf_mmparallel.data.packing import PackingCollator, unpack
from hf_mmparallel.kernels.bitfield_attention import decode_words
from hf_mmparallel.modeling import build_model_spec, count_feature_tokens
from tests import tiny
from tests.deep_cases import third

from .conversations import assert_same_batch, left_padded

TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt_oss", "mixtral")
TEXT_FAMILIES += ("gpt2", "opt")  # with learned positions
IMAGE_FAMILIES = ["llava", "llava_onevision", "gemma3", "paligemma", "internvl", "mistral3"]
AXES_FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]  # whose positions have three axes


def make_model(family: str, attention: str) -> Any:
    """A model of the family whose language model has this attention function."""
    if family not in TEXT_FAMILIES:
        return tiny.attending(tiny.FAMILIES[family](), attention).train()
    model: Any = shrunk_models.build(family)
    if hasattr(model, "router_aux_loss_coef"):
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.1
    return tiny.attending(model, attention)


def data_family(family: str) -> str:
    return "llama" if family in TEXT_FAMILIES else family


def packer(family: str, model: Any = None, **settings: Any) -> PackingCollator:
    collate: Any = tiny.collate(data_family(family))
    return PackingCollator(collate, model or make_model(family, "bitfield"), **settings)


def samples_of(family: str, count: int = 4, **settings: Any) -> list[dict[str, Tensor]]:
    return tiny.make_dataset(data_family(family), count, **settings)


def trained_once(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and the gradients that there are, by name."""
    loss: Any = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def video_samples(family: str) -> list[dict[str, Tensor]]:
    """Samples with a video each; Qwen3-VL has marks around each of its frames."""
    samples = []
    for index, grid in enumerate([(1, 4, 2), (2, 4, 4), (1, 4, 4), (2, 4, 2)]):
        tokens = grid[0] * grid[1] * grid[2] // 4
        frames = [tokens // grid[0]] * grid[0] if family == "qwen3_vl" else [tokens]
        runs = [torch.tensor([102, *[tiny.VIDEO_TOKEN] * count, 103]) for count in frames]
        ids = torch.cat([torch.randint(1, 90, (4 + index,)), *runs, torch.randint(1, 90, (7 - index,))])
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(ids >= 100, -100),
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": 2 * (ids == tiny.VIDEO_TOKEN).int(),
                "pixel_values_videos": torch.randn(4 * tokens, 3 * 2 * 8 * 8),
                "video_grid_thw": torch.tensor([grid]),
            }
        )
    return samples


def assert_packed_equals_padded(family: str, samples: list[dict[str, Tensor]]) -> None:
    """Asserts equal losses and gradients at float32 rounding."""
    wanted, gradients = trained_once(make_model(family, "eager"), tiny.collate(data_family(family))(samples))
    packed = packer(family)(samples)
    assert packed["input_ids"].shape == (1, sum(len(sample["input_ids"]) for sample in samples))
    loss, got = trained_once(make_model(family, "bitfield"), packed)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    assert got.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error, size = float((got[name] - gradient).abs().max()), float(gradient.abs().max())
        assert error <= 2e-6 + 2e-5 * size, (name, error, size)


@pytest.mark.parametrize("family", AXES_FAMILIES)
def test_packed_videos_train_as_padded_ones(family: str):
    assert_packed_equals_padded(family, video_samples(family))


PADDED_TOO = [*TEXT_FAMILIES, *IMAGE_FAMILIES, *AXES_FAMILIES, "qwen2_5_omni", "voxtral"]


@pytest.mark.parametrize("family", third(PADDED_TOO))
def test_a_packed_row_has_the_loss_and_the_gradients_of_the_padded_batch(family: str):
    samples = samples_of(family, seed=torch.seed() % 1000)
    for sample in samples:
        sample["labels"] = sample["input_ids"].masked_fill(sample["labels"] == -100, -100)
        sample["labels"][0] = sample["input_ids"][0]  # in a row of its own nothing predicts it
    assert_packed_equals_padded(family, samples)


def test_padding_at_the_end_and_at_the_left_changes_nothing():
    samples, model, collate = samples_of("gemma3"), make_model("gemma3", "bitfield"), tiny.collate("gemma3")
    plain = packer("gemma3")(samples)
    left = PackingCollator(lambda samples: left_padded(collate(list(samples))), model)
    assert_same_batch(left(samples), plain)
    padded = packer("gemma3", pad_to_multiple_of=64)(samples)
    length = plain["input_ids"].shape[1]
    assert padded["input_ids"].shape == (1, 128) and length < 128
    for name, fill in (("input_ids", 0), ("labels", -100), ("attention_words", 0)):
        assert torch.equal(padded[name][:, :length], plain[name]) and (padded[name][:, length:] == fill).all()
    with torch.no_grad():
        torch.testing.assert_close(model(**padded).loss, model(**plain).loss)


def test_text_without_token_types_gets_three_axes_and_images_without_them_are_refused():
    texts, model = samples_of("llama", 3), make_model("qwen2_vl", "bitfield")
    counted = torch.cat([torch.arange(len(sample["input_ids"])) for sample in texts])
    assert torch.equal(packer("llama", model)(texts)["position_ids"], counted.expand(3, 1, -1))
    images = [{k: v for k, v in sample.items() if k != "mm_token_type_ids"} for sample in samples_of("qwen2_vl", 2)]
    with pytest.raises(ValueError, match="`mm_token_type_ids`"):
        packer("qwen2_vl", model)(images)


def test_the_row_says_which_sample_each_token_is_of():
    samples = samples_of("llava", 5)
    packed = packer("llava")(samples)
    fields = decode_words(packed["attention_words"])
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert torch.equal(fields.segment[0], torch.arange(1, 6).repeat_interleave(torch.tensor(lengths)))
    assert "attention_mask" not in packed and packed["pixel_values"].shape[0] == 6
    for name in ("input_ids", "labels"):
        back = unpack(packed[name], packed["attention_words"])
        assert back.shape == (5, max(lengths))
        for row, sample in zip(back, samples, strict=True):
            wanted = sample[name].clone()
            wanted[0] = wanted[0] if name == "input_ids" else -100
            assert torch.equal(row[: len(wanted)], wanted)
            assert (row[len(wanted) :] == -100).all()
    logits = torch.randn(1, sum(lengths), 7)
    torch.testing.assert_close(unpack(logits, packed["attention_words"])[2, : lengths[2]], logits[0].split(lengths)[2])


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "llama"])
def test_rows_of_features_are_counted_by_sample(family: str):
    spec = build_model_spec(make_model(family, "bitfield"))
    samples = samples_of(family, 5)
    samples[0], samples[2] = samples[2], samples[0]  # a sample without images first
    padded = tiny.collate(data_family(family))(samples)
    packed = packer(family, pad_to_multiple_of=32)(samples)
    counts = count_feature_tokens(padded, spec.placeholders)
    assert count_feature_tokens(packed, spec.placeholders) == counts
    assert all(len(rows) == 5 for rows in counts.values()) and (family == "llama" or sum(counts["image"]) > 0)
    unpacked = {"input_ids": padded["input_ids"], "attention_words": padded["attention_mask"].long()}
    assert count_feature_tokens(unpacked, spec.placeholders) == counts


def test_shifted_labels_and_given_positions_are_kept():
    samples: list[dict[str, Tensor]] = [{"input_ids": sample["input_ids"]} for sample in samples_of("llama", 3)]
    for sample in samples:
        sample["attention_mask"] = torch.ones_like(sample["input_ids"])
        sample["shift_labels"] = nn.functional.pad(sample["input_ids"][1:], (0, 1), value=-100)
        sample["position_ids"] = torch.arange(len(sample["input_ids"])) + 7
        sample["weights"] = torch.rand(len(sample["input_ids"]))

    def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
        return {name: nn.utils.rnn.pad_sequence([s[name] for s in samples], True) for name in samples[0]}

    packed = PackingCollator(collate, make_model("llama", "bitfield"), token_fields=["weights"])(samples)
    for name in ("shift_labels", "position_ids", "weights"):
        assert torch.equal(packed[name][0], torch.cat([sample[name] for sample in samples]))


def test_one_row_of_positions_serves_all_samples():
    samples = samples_of("llama", 3)

    def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
        batch = tiny.collate("llama")(list(samples))
        return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}

    pack = PackingCollator(collate, make_model("llama", "bitfield"))
    assert torch.equal(pack(samples)["position_ids"], packer("llama")(samples)["position_ids"])


class Collate:
    """A collator that can be pickled."""

    tokenizer = "the tokenizer"

    def __init__(self, family: str):
        self.family = family

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        return tiny.collate(data_family(self.family))(list(samples))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"])
def test_it_is_sent_to_workers_without_weights_and_has_the_tokenizer_for_the_trainer(family: str):
    samples, pack = samples_of(family, 4), PackingCollator(Collate(family), make_model(family, "bitfield"))
    unused = len(pickle.dumps(pack))
    wanted, sent = pack(samples), pickle.dumps(pack)
    assert len(sent) == unused < 50_000
    assert_same_batch(pickle.loads(sent)(samples), wanted)
    assert pack.tokenizer == "the tokenizer" and not hasattr(packer(family), "tokenizer")


def test_a_row_over_the_budget_is_refused():
    samples = samples_of("llama", 3)
    total = sum(len(sample["input_ids"]) for sample in samples)
    assert packer("llama", max_length=total)(samples)["input_ids"].shape == (1, total)
    with pytest.raises(ValueError, match=rf"3 samples .* a row of {total} tokens, .*`max_length={total - 1}`"):
        packer("llama", max_length=total - 1)(samples)
    with pytest.raises(ValueError, match=rf"a row of {total}, padded to 64, tokens, .*`max_length={total}`"):
        packer("llama", max_length=total, pad_to_multiple_of=64)(samples)
    for name in ("max_length", "pad_to_multiple_of"):
        with pytest.raises(ValueError, match=f"`{name}=0`"):
            packer("llama", **{name: 0})


@pytest.mark.parametrize(("family", "key"), [("llama", "'b"), ("llava", "{'text_config': 'b")])
def test_another_attention_function_is_refused_before_it_is_silently_wrong(family: str, key: str):
    model, changed = make_model(family, "sdpa"), make_model(family, "bitfield")
    pack = packer(family, changed)
    changed.set_attn_implementation("sdpa")
    for refused in (lambda: packer(family, model), lambda: packer(family, model.config), lambda: pack([])):
        with pytest.raises(ValueError, match=rf"'sdpa'.*`model.set_attn_implementation\({key}itfield'"):
            refused()


def test_a_sample_without_tokens_and_a_field_of_another_length_are_refused():
    batch, pack = tiny.collate("llama")(samples_of("llama", 3)), packer("llama")
    empty = batch["attention_mask"].clone()
    empty[1] = 0
    with pytest.raises(ValueError, match="Sample 1 "):
        pack.pack({**batch, "attention_mask": empty})
    with pytest.raises(ValueError, match=r"`labels` has the shape \(3, 5\)"):
        pack.pack({**batch, "labels": batch["labels"][:, :5], "position_ids": batch["input_ids"]})
    without = {name: value for name, value in batch.items() if name != "attention_mask"}
    with pytest.raises(ValueError, match="no `attention_mask`"):
        pack.pack(without)
