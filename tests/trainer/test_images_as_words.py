"""Models of transformers that generate train as they are, as far as the loss of their class has what they generate."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from hf_mmparallel.modeling import build_model_spec, check_supported
from hf_mmparallel.trainer.start_checks import check_model
from tests import tiny
from tests.deep_cases import in_turn

from . import runs

LM = "language_model"
IMAGE, END_OF_LINE, FIRST_CODE, NUM_CODES = 100, 101, 60, 32
SIDE = 8  # of images, of which two by two pixels become a word
TOKENIZER: dict[str, Any] = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "embed_dim": 4,
    "latent_channels": 4,
}


def emu3() -> PreTrainedModel:
    """The class that reads and draws images as words, which its tokenizer makes beforehand."""
    return hf.Emu3ForCausalLM(hf.Emu3TextConfig(**tiny.TEXT, attention_dropout=0.0, bos_token_id=1, eos_token_id=2))


def emu3_with_its_tokenizer() -> PreTrainedModel:
    words = {f"<|visual token {code:06d}|>": FIRST_CODE + code for code in range(NUM_CODES)}
    tokenizer = {"codebook_size": NUM_CODES, "hidden_size": 32, "attn_resolutions": [1], **TOKENIZER}
    text = {**tiny.TEXT, "bos_token_id": 1, "eos_token_id": 2}
    vocabulary = {"<image>": IMAGE, "<|extra_200|>": END_OF_LINE, **words}
    return hf.Emu3ForConditionalGeneration(
        hf.Emu3Config(vq_config=tokenizer, text_config=text, vocabulary_map=vocabulary)
    )


def chameleon() -> PreTrainedModel:
    digits = [
        f"{code:d}".translate({ord(str(digit)): chr(ord("A") + digit) for digit in range(10)})
        for code in range(NUM_CODES)
    ]
    words = {f"IMGIMG{name}Z": FIRST_CODE + code for code, name in enumerate(digits)}
    return hf.ChameleonForConditionalGeneration(
        hf.ChameleonConfig(
            vq_config={"num_embeddings": NUM_CODES, "resolution": SIDE, **TOKENIZER},
            **tiny.TEXT,
            vocabulary_map={"<image>": IMAGE, **words},
        )
    )


def janus() -> PreTrainedModel:
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE, "patch_size": 2}
    codes = {"num_embeddings": NUM_CODES, "num_patches": 4, "projection_dim": 64, "image_token_embed_dim": 64}
    return hf.JanusForConditionalGeneration(
        hf.JanusConfig(
            vision_config={**vision, "projection_dim": 64, "num_image_tokens": 16},
            text_config={**tiny.TEXT, "model_type": "llama"},
            vq_config={**codes, **TOKENIZER},
            image_token_id=IMAGE,
        )
    )


MODELS = {"emu3": emu3, "chameleon": chameleon, "janus": janus}
STAGES: dict[str, Any] = {LM: {"pp_size": 2}}
# Name -> (model, layout), all on two ranks
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stages of Emu3": ("emu3", STAGES),
    "Emu3 with tensor parallelism": ("emu3", {LM: {"tp_size": 2}}),
    "stages of Chameleon": ("chameleon", STAGES),
    "Janus beside its encoder": ("janus", {}),
}


def make_dataset(name: str, size: int = runs.SAMPLES) -> list[dict[str, Tensor]]:
    """Samples with no, one or two images: to read, or Emu3's to draw, as words that are targets."""
    generator, samples = torch.Generator().manual_seed(0), []
    for index in range(size):
        count, pieces = index % 3, [torch.randint(1, 50, (4 + index % 2,), generator=generator)]
        for _ in range(count):
            drawn = torch.randint(NUM_CODES, (SIDE // 2, SIDE // 2), generator=generator) + FIRST_CODE
            drawn = torch.nn.functional.pad(drawn, (0, 1), value=END_OF_LINE)
            image = drawn.flatten() if name == "emu3" else torch.tensor([IMAGE] * (SIDE // 2) ** 2)
            pieces += [image, torch.randint(1, 50, (2,), generator=generator)]
        ids = torch.cat([*pieces, torch.randint(1, 50, (5,), generator=generator)])
        labels = ids.masked_fill(ids == IMAGE, -100)
        sample = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        if count and name != "emu3":
            sample["pixel_values"] = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        samples.append(sample)
    return samples


def words_of(name: str) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]()
    return {"model": model, "data": make_dataset(name), "max_steps": 2, "warmup_steps": 0}


@pytest.mark.distributed
def test_layouts_equal_the_stock_trainer():
    chosen = in_turn(LAYOUTS, "stages of Emu3")
    layouts = {key: runs.Layout("llava", layout, partial(words_of, name)) for key, (name, layout) in chosen.items()}
    runs.assert_layouts_equal_the_stock_trainer(2, layouts)


def test_the_tokenizer_of_images_is_before_the_layers_of_the_language_model():
    for model in (chameleon(), emu3_with_its_tokenizer()):
        spec = build_model_spec(model)
        assert list(spec.modules) == [LM]
        check_supported(model)
        assert {p.layer for p in spec.modules[LM].parameters if "vqmodel" in p.name} == {-1}
    with pytest.raises(ValueError, match="BatchNorm3d"):  # the words of an image depend on the others in the batch
        check_model(emu3_with_its_tokenizer())


def test_a_decoder_of_codebooks_with_a_loss_of_its_own_is_refused():
    with torch.device("meta"):
        model = hf.CsmForConditionalGeneration(hf.CsmConfig())
    with pytest.raises(ValueError, match="`depth_decoder` with a loss of its own"):
        check_model(model)
