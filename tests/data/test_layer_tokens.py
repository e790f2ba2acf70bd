"""What encoders are said to see is what enters their first layer, sample by sample."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import ConcatDataset, Subset
from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration

from hf_mmparallel.data import PretokenizedCollator
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.layer_tokens import measure_layers
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.size_sources import LayerTokens
from hf_mmparallel.data.streams import StreamWindow
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.prepare import prepare_stages
from hf_mmparallel.modeling.spec import layers_of
from hf_mmparallel.modeling.unowned import hidden_of
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from tests.deep_cases import deep
from tests.modeling.test_composed import compose, make_samples
from tests.streams import Rows
from tests.tiny import AUDIO_TOKEN, FAMILIES, TEXT, TEXT_ONLY, collate, make_dataset


@contextmanager
def seen(model: torch.nn.Module, stack: str) -> Iterator[list[tuple[int, float]]]:
    """Tokens and squared lengths of sequences that enter the first layer of a stack, run by run."""
    found: list[tuple[int, float]] = []

    def note(layer, args, kwargs) -> None:
        shape = hidden_of(args, kwargs).shape[:-1]
        ends = kwargs.get("cu_seqlens")
        lengths = [shape[-1]] * (shape[0] if len(shape) == 2 else 1) if ends is None else ends.diff().tolist()
        found.append((int(np.prod(shape)), float(sum(n * n for n in lengths))))

    handle = layers_of(model, stack)[0].register_forward_pre_hook(note, with_kwargs=True)
    yield found
    handle.remove()


Sizes = dict[str, list[tuple[int, float]]]  # encoder -> tokens and squares of each sample


def truth(model: Any, spec: Any, samples: list[dict], collator: Any) -> Sizes:
    """From running the whole model on each sample."""
    result: Sizes = {}
    for name in spec.encoders:
        for sample in samples:
            with seen(model, spec.modules[name].stack) as found, torch.no_grad():
                model(**{key: value for key, value in collator([sample]).items() if key != "labels"})
            result.setdefault(name, []).append((sum(n for n, _ in found), sum(s for _, s in found)))
    return result


def measured(model: Any, spec: Any, samples: Any, collator: Any) -> Sizes:
    """From the samples' metadata."""
    source = size_source(samples, collator, spec)
    sizes = source.with_layers(measure_layers(model, spec, samples, collator, source))(range(len(samples)))
    return {n: list(zip(sizes.tokens[n].tolist(), sizes.squares[n].tolist(), strict=True)) for n in spec.encoders}


# Windows inside an image count as if its attention were over all of it; images of Pixtral share a row of the batch.
SQUARES_DIFFER = ("qwen2_5_vl", "qwen2_5_omni", "mistral3")


@pytest.mark.parametrize(
    "family",
    [
        "composed",
        *(deep(f, unless=f in ("qwen2_5_vl", "mistral3", "voxtral")) for f in FAMILIES if f not in TEXT_ONLY),
    ],
)
def test_sizes_are_what_layers_see(family):
    if family == "composed":
        (model, rows), collator = compose("clip_whisper_llama"), PretokenizedCollator()
        samples = make_samples("clip_whisper_llama", rows, (1, 2, 0, 1))
    else:
        model, samples, collator = FAMILIES[family](), make_dataset(family, 7), collate(family)
    spec = build_model_spec(model)
    expected = truth(model, spec, samples, collator)
    found = measured(model, spec, samples, collator)
    columns = 1 if family in SQUARES_DIFFER else 2
    for name in spec.encoders:
        assert [pair[:columns] for pair in found[name]] == [pair[:columns] for pair in expected[name]]


@pytest.fixture(scope="module")
def llava() -> tuple[Any, Any, Any]:
    model = FAMILIES["llava"]()
    return model, build_model_spec(model), collate("llava")


@pytest.mark.parametrize("family", ["llava", deep("qwen3_vl"), deep("voxtral")])
def test_a_model_on_the_meta_device_and_what_a_rank_keeps_of_one_are_measured(family):
    samples, collator = make_dataset(family, 5), collate(family)
    whole, kept = FAMILIES[family](), FAMILIES[family]()
    spec = build_model_spec(whole)
    wanted = measured(whole, spec, samples, collator)
    assert measured(FAMILIES[family]().to("meta"), spec, samples, collator) == wanted
    prepare_stages(kept, spec, resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)}), rank=2)
    assert measured(kept, spec, samples, collator) == wanted


FIVE = {"vision": LayerTokens(1.25, 0.0, 5)}  # for four rows of an image, a class token too


def test_the_first_samples_of_a_stream_are_measured(llava):
    model, spec, collator = llava
    stream = Rows(make_dataset("llava", 100))
    window = StreamWindow(stream)
    source = size_source(window, collator, spec)
    layers = measure_layers(model, spec, window, collator, source)
    assert layers == FIVE
    assert stream.num_read <= 64 and not window.rows
    window.fetch(GlobalBatch((0, 1, 2)))
    assert source.with_layers(layers)([0, 1, 2]).tokens["vision"].tolist() == [5, 10, 0]
    assert measure_layers(model, spec, StreamWindow(Rows([])), collator, source) == {}


@pytest.mark.parametrize("make", [list, Dataset.from_list, lambda rows: StreamWindow(Rows(rows))])
def test_sizes_that_are_given_stay(llava, make):
    model, spec, collator = llava
    data = make([{"n": 3, "input_ids": [1]}] * 2)
    if isinstance(data, StreamWindow):
        data.fetch(GlobalBatch((0, 1)))
    for words in (
        {"columns": {LANGUAGE_MODEL: "n", "vision": "n"}},
        {"function": lambda sample: {LANGUAGE_MODEL: 7, "vision": 3}},
    ):
        given = size_source(data, collator, spec, **words)
        assert measure_layers(model, spec, data, collator, given) == {}
        assert given.with_layers({"vision": LayerTokens(9.0)})([1]).tokens["vision"].tolist() == [3]
    assert measure_layers(model, spec, data, collator, None) == {}


def clips(*rows: int) -> list[dict[str, Any]]:
    """Sound of several lengths, padded to one."""
    return [
        {
            "input_ids": torch.tensor([1, 2, *[AUDIO_TOKEN] * count, 3]),
            "input_features": torch.randn(1, 16, 32),
            "input_features_mask": (torch.arange(32) < 4 * count).long()[None],
        }
        for count in rows
    ]


def test_padded_sound_counts_as_what_it_is_padded_to():
    encoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    lengths = {"model_type": "audioflamingo3_encoder", "num_mel_bins": 16, "max_source_positions": 16}
    text = {"model_type": "qwen2", **TEXT}
    config = AudioFlamingo3Config(audio_config=lengths | encoder, text_config=text, audio_token_id=AUDIO_TOKEN)
    model = AudioFlamingo3ForConditionalGeneration(config).eval()
    spec, samples = build_model_spec(model), clips(2, 8, 5, 1, 5)
    found = measured(model, spec, samples, PretokenizedCollator())
    assert found == truth(model, spec, samples, PretokenizedCollator()) == {"audio": [(16, 256.0)] * 5}


def test_media_late_in_the_dataset_are_found(llava):
    model, spec, collator = llava
    texts = [sample for sample in make_dataset("llava", 9) if "pixel_values" not in sample]
    data = ConcatDataset([texts * 200, Subset(make_dataset("llava", 5), [0, 1])])
    source = size_source(data, collator, spec)
    layers = measure_layers(model, spec, data, collator, source)
    assert layers == FIVE
    assert source.with_layers(layers)([0, 600, 601]).tokens["vision"].tolist() == [0, 5, 10]


def test_the_model_stays_as_it_is():
    model, samples = FAMILIES["llava"](), make_dataset("llava", 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    measured(model, build_model_spec(model), samples, collate("llava"))
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Broken(list):
    def __getitem__(self, index):
        if index == 1:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


@pytest.mark.parametrize("where", ["sizes", "dataset", "collator", "everywhere"])
def test_samples_that_can_not_be_read_are_passed_over(llava, where):
    model, spec, collator = llava
    samples = make_dataset("llava", 4)
    source = size_source(samples, collator, spec)
    (part,) = source.parts
    read = part.read

    def refusing(batch):
        if where == "everywhere" or (where == "collator" and any(sample is samples[1] for sample in batch)):
            raise OSError("no")
        return collator(batch)

    if where == "sizes":
        refuse = lambda indices: [OSError() if n == 1 else read([n])[0] for n in indices]  # noqa: E731
        source.parts = [replace(part, read=refuse)]
    data = Broken(samples) if where == "dataset" else samples
    found = measure_layers(model, spec, data, refusing, source)
    assert found == ({} if where == "everywhere" else FIVE)
    assert where == "sizes" or source.with_layers({})(range(4)).tokens["vision"].tolist() == [4, 8, 0, 4]  # rows
