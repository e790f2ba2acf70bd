"""Composed models with generators: their loss, their folders, and what of them a plan describes."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers as hf
from torch.nn import functional

from hf_mmparallel import MultimodalModel
from hf_mmparallel.modeling import build_model_spec
from tests import any_to_any as cases
from tests import tiny
from tests.any_to_any import DRAWN_TOKEN, IMAGE, KINDS, NUM_ROWS


def rows_of(model: MultimodalModel, batch: dict) -> torch.Tensor:
    """The hidden states at the placeholders, by the language model alone."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "pixel_values")}
    hidden = model.model(**inputs).last_hidden_state
    return hidden[batch["input_ids"] == DRAWN_TOKEN]


def expected_loss(kind: str, model: MultimodalModel, batch: dict) -> torch.Tensor:
    """The mean loss of the generator, by its parts and the functions of torch and diffusers."""
    generator = model.generators[IMAGE]
    condition = generator.projector(rows_of(model, batch)).view(-1, NUM_ROWS, generator.width)
    if kind == "codes":
        logits = generator.head(generator.tower(inputs_embeds=condition).last_hidden_state)
        return functional.cross_entropy(logits.view(-1, 30), batch["image_codes"].flatten())
    latents, noise, times = batch["image_latents"], [], []
    for seed in batch["image_seeds"].tolist():
        drawn = torch.Generator().manual_seed(seed)
        times.append(torch.rand((), generator=drawn))
        noise.append(torch.randn(cases.SHAPE, generator=drawn))
    noise, times = torch.stack(noise), torch.stack(times)
    if kind == "dit":
        mixed = torch.stack([(1 - t) * x + t * n for x, n, t in zip(latents, noise, times, strict=True)])
        output = generator.tower(mixed, encoder_hidden_states=condition, timestep=1000 * times).sample
        return functional.mse_loss(output, noise - latents)
    steps = (1000 * times).long()
    noisy = generator.scheduler.add_noise(latents, noise, steps)
    return functional.mse_loss(generator.tower(noisy, steps, condition).sample, noise)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_weighted_sum_of_the_means_of_the_parts(kind: str):
    model, batch = cases.compose(kind), cases.make_batch(kind)
    output = model(**batch)
    text = model(**{key: value for key, value in batch.items() if not key.startswith("image_")}).loss
    wanted = expected_loss(kind, model, batch)
    assert output.losses.keys() == {"language_model", IMAGE}
    torch.testing.assert_close(output.losses[IMAGE], wanted.detach())
    torch.testing.assert_close(output.loss, text + 0.5 * wanted)
    output.loss.backward()
    unused = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert not {name for name in unused if "generators" in name or "language_model" in name}, unused


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind: str, tmp_path):
    model, batch = cases.compose(kind).eval(), cases.make_batch(kind)
    model.save_pretrained(tmp_path)
    loaded, info = MultimodalModel.from_pretrained(tmp_path, output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(loaded.eval()(**batch).loss, model(**batch).loss, rtol=0, atol=0)
    assert hf.AutoConfig.from_pretrained(tmp_path).image_token_id == DRAWN_TOKEN
    tower: Any = model.generators[IMAGE].tower  # for its own library alone
    tower.save_pretrained(tmp_path / "tower")
    library: Any = hf if kind == "codes" else diffusers
    alone = library.AutoModel.from_pretrained(str(tmp_path / "tower"))
    assert type(alone) is type(tower)
    torch.testing.assert_close(dict(alone.named_parameters()), dict(tower.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_can_be_chosen(kind: str):
    model, batch = cases.compose(kind, layer=2).eval(), cases.make_batch(kind)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "pixel_values")}
    output = model(**inputs, output_rows=True, output_hidden_states=True)
    wanted = output.hidden_states[2][batch["input_ids"] == DRAWN_TOKEN]
    torch.testing.assert_close(output.rows[IMAGE], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_of_a_generator_are_a_module_behind_the_language_model(kind: str):
    model = cases.compose(kind)
    spec = build_model_spec(model)
    assert list(spec.modules) == ["vision", "language_model", IMAGE] and spec.generators == (IMAGE,)
    assert [(edge.source, edge.target) for edge in spec.edges] == [
        ("vision", "language_model"),
        ("language_model", IMAGE),
    ]
    module = spec.modules[IMAGE]
    names = {name for name, _ in model.named_parameters() if name.startswith("generators.")}
    assert {parameter.name for parameter in module.parameters} == names
    layers = {
        parameter.name.split(".")[2]: parameter.layer
        for parameter in module.parameters
        if "tower" not in parameter.name
    }
    assert layers == ({"projector": -1, "head": 4} if kind == "codes" else {"projector": -1})
    assert module.is_chain == (kind == "codes")
    frozen = module.with_frozen("tower").parameters
    assert {parameter.name.split(".")[2] for parameter in frozen if parameter.trainable} == set(layers)


_READ = """
import sys
from hf_mmparallel.modeling.loading import build_on_meta
sys.stdout.write(type(build_on_meta(sys.argv[1])).__name__)
"""


@pytest.mark.deep
def test_a_folder_is_read_where_nothing_else_was_imported(tmp_path):
    cases.compose("unet").save_pretrained(tmp_path)
    command = [sys.executable, "-c", _READ, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout == "MultimodalModel"


def without_tokens(batch: dict) -> dict:
    return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == DRAWN_TOKEN, 1)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (without_tokens, "0 placeholders of generator `image`.*`image_codes` has"),
        (lambda batch: {**batch, "image_codes": batch["image_codes"][1:]}, "`image_codes` has"),
        (lambda batch: {**batch, "image_codes": batch["image_codes"][..., :1]}, "codes of shape"),
        (lambda batch: {**batch, "video_codes": batch["image_codes"]}, "`video_codes`.*does not have"),
    ],
)
def test_targets_that_do_not_fit_are_a_sentence(change: Callable[[dict], dict], match: str):
    with pytest.raises(ValueError, match=match):
        cases.compose("codes")(**change(cases.make_batch("codes")))


@pytest.mark.parametrize(
    ("tower", "match"),
    [
        (torch.nn.Linear(4, 4), "`Linear`, which has no loss"),
        (diffusers.AutoencoderKL(), "no `encoder_hidden_states`"),
        (hf.LlamaConfig(**tiny.TEXT), "Set `num_codes`"),
    ],
)
def test_a_generator_without_a_loss_is_a_sentence(tower: Any, match: str):
    with pytest.raises(ValueError, match=match):
        MultimodalModel.from_unimodal(
            {"vision": hf.CLIPVisionConfig(**tiny.VISION)},  # type: ignore[arg-type]
            hf.LlamaConfig(**tiny.TEXT),  # type: ignore[arg-type]
            {"vision": tiny.MEDIA_TOKEN, IMAGE: DRAWN_TOKEN},
            generators={IMAGE: tower},
            generator_settings={IMAGE: {"num_tokens": 4}},
        )
