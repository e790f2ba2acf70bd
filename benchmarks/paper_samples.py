"""
Samples with the sizes of the four datasets of Entrain, drawn from distributions that are fitted to what its text says.

What the paper states is in [`Stated`]: the GPUs that encoder and language model get in proportion to their work in a
profiling batch, the batch size from which 60 batches agree on that, and how much the forwards of microbatches vary.
Everything else is assumed: log-normal areas of images and lengths of text that vary independently of each other, the
sizes of Qwen2.5-VL's encoder and of Llama 3.2, operation counts, and the share of an A40's peak that a model reaches.

The shares are fitted, too. By operations alone Llama 3b is 2.6 times as much work as 1b, while the splits of the same
dataset for both (8:8 and 10:6, say) leave room for 1.3 to 2.2 only.

Three statements can't hold together with the tables and are not fitted: a mean ratio of 1.27 for SynthChartNet with
Llama 3b (section 4.7.3; it would be a split of 9:7, table 4.2 has 8:8), one of 2.43 for LLaVA-150k (figure 4.5; more
than any single sample in tables C.3 and C.6; the work of the encoder over that of the text tokens alone in Llama 1b is
2.6 here), and the standard deviation of Llama on CocoQA (table 4.3; less than its images alone bring about).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_mmparallel.cost import find_device, module_flops
from hf_mmparallel.cost.image_tokens import PatchGrid
from hf_mmparallel.papers.sample_presets import MERGE, PATCH_PIXELS, SAMPLE_PRESETS, SamplePreset
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    FeatureSpec,
    ModelSpec,
    ModuleSpec,
    ParameterSpec,
    SampleSizes,
    Workloads,
)

VISION = "vision"
WINDOW_TOKENS = (112 // PATCH_PIXELS) ** 2
GLOBAL_LAYERS = 4
EMBEDDINGS = "language_model.embed_tokens.weight"


@dataclass(frozen=True)
class Stated:
    """
    Entrain's figures for a dataset, with Qwen2.5-VL's encoder and Llama 3 of 1b or 3b parameters.

    Args:
        splits (`Mapping[str, tuple[int, int]]`):
            Model -> of 16 GPUs, those of the encoder and those of the language model at batch size 256 (tables 4.2 and
            C.2 to C.8).
        stable_from (`Mapping[str, int]`):
            Model -> the smallest of the batch sizes 1, 4, 16, 64 and 256 at which all trials show the same split.
        forward_std_ms (`Mapping[str, Mapping[str, float]]`):
            Method -> module or model -> standard deviation of the forward time of microbatches of 4 samples, with
            `tp_size=2` (table 4.3).
        parallel_sizes (`Mapping[str, Mapping[str, tuple[int, int]]]`):
            Model -> method -> stages of the encoder and of the language model, each with `tp_size=2` and `dp_size=4`
            (tables 4.1 and C.1); DIP has both on the same 8 stages.
    """

    splits: Mapping[str, tuple[int, int]]
    stable_from: Mapping[str, int]
    forward_std_ms: Mapping[str, Mapping[str, float]]
    parallel_sizes: Mapping[str, Mapping[str, tuple[int, int]]]


@dataclass(frozen=True)
class PublishedShape:
    """
    The distribution of the sizes of a dataset's samples.

    Args:
        preset ([`SamplePreset`]): The distribution, fitted.
        stated (`Stated`): What the paper says of it.
    """

    preset: SamplePreset
    stated: Stated

    @property
    def name(self) -> str:
        return self.preset.name

    def draw(self, num_samples: int, seed: int) -> SampleSizes:
        """
        Draws samples.

        Args:
            num_samples (`int`): How many.
            seed (`int`): Equal seeds give equal samples.

        Returns:
            `SampleSizes`: Of `vision`, in patches, and of `language_model`, whose tokens are the text and a quarter of
            the patches. The squares of the encoder are the mean over its layers, most of which attend within windows.
        """
        return self.preset.draw_images(num_samples, seed).sizes(VISION, QWEN_GRID)


def _stack(prefix: str, shapes: Mapping[str, tuple[int, ...]], num_layers: int) -> tuple[ParameterSpec, ...]:
    """The matrices of each layer; the vectors beside them cost nothing worth counting."""
    return tuple(
        ParameterSpec(f"{prefix}.{layer}.{name}.weight", shape, layer, "bfloat16")
        for layer in range(num_layers)
        for name, shape in shapes.items()
    )


def _qwen_vision() -> ModuleSpec:
    """The encoder of Qwen2.5-VL with the projector in front of a model of width 2048."""
    width, inner, num_layers = 1280, 3420, 32
    shapes = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    merged = width * MERGE**2
    patches = ParameterSpec(
        "visual.patch_embed.proj.weight", (width, 3, 2, PATCH_PIXELS, PATCH_PIXELS), -1, "bfloat16"
    )
    merger = tuple(
        ParameterSpec(f"visual.merger.mlp.{index}.weight", (rows, merged), num_layers, "bfloat16")
        for index, rows in ((0, merged), (2, 2048))
    )
    parameters = (patches, *_stack("visual.blocks", shapes, num_layers), *merger)
    return ModuleSpec(
        VISION, "visual.blocks", num_layers, width, 16, 16, inner, parameters, (FeatureSpec("image"),), "visual.blocks"
    )


def _llama(num_layers: int, width: int, num_heads: int, head_width: int) -> ModuleSpec:
    """Llama 3.2 with 8 heads of keys and values; its head is its table of embeddings."""
    inner, num_kv_heads = 8192, 8
    shapes = {
        "self_attn.q_proj": (num_heads * head_width, width),
        "self_attn.k_proj": (num_kv_heads * head_width, width),
        "self_attn.v_proj": (num_kv_heads * head_width, width),
        "self_attn.o_proj": (width, num_heads * head_width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    embeddings = ParameterSpec(EMBEDDINGS, (128256, width), -1, "bfloat16")
    stack = "language_model.layers"
    parameters = (embeddings, *_stack(stack, shapes, num_layers))
    return ModuleSpec(
        LANGUAGE_MODEL, stack, num_layers, width, num_heads, num_kv_heads, inner, parameters, tower=stack
    )


QWEN_VISION = _qwen_vision()
QWEN_GRID = PatchGrid(PATCH_PIXELS, MERGE, QWEN_VISION.num_layers, GLOBAL_LAYERS, WINDOW_TOKENS)


@dataclass(frozen=True)
class PublishedModel:
    """
    One of the paper's models.

    Args:
        spec (`ModelSpec`): Its sizes.
        efficiency (`Mapping[str, float]`): Module -> the share of an A40's peak that it reaches, as fitted.
    """

    spec: ModelSpec
    efficiency: Mapping[str, float]

    def workloads(self, sizes: SampleSizes) -> Workloads:
        """
        The forward times of samples, of which a stage has the share of its layers and a rank that of its stage.

        Args:
            sizes (`SampleSizes`): From [`PublishedShape.draw`].

        Returns:
            `Workloads`: Milliseconds on one A40. All is trained, so that a backward takes two forwards.
        """
        forward_ms = {}
        for name in self.spec.modules:
            per_token, per_square = module_flops(self.spec, name)
            flops = per_token * sizes.tokens[name] + per_square * sizes.squares[name]
            forward_ms[name] = flops / (find_device("a40").peak_tflops * 1e9 * self.efficiency[name])
        return Workloads(forward_ms, dict.fromkeys(forward_ms, 2.0), dict(sizes.tokens), {})


def _model(llama: ModuleSpec, efficiency: float) -> PublishedModel:
    """The encoder in front of a language model."""
    tied = {EMBEDDINGS: ((LANGUAGE_MODEL, llama.num_layers),)}
    spec = ModelSpec({VISION: QWEN_VISION, LANGUAGE_MODEL: llama}, tied, {"image": 128256})
    return PublishedModel(spec, {VISION: 0.142, LANGUAGE_MODEL: efficiency})


PUBLISHED_MODELS: Mapping[str, PublishedModel] = {
    "llama3-1b": _model(_llama(16, 2048, 32, 64), 0.154),
    "llama3-3b": _model(_llama(28, 3072, 24, 128), 0.246),
}


def _stated(
    splits: tuple[tuple[int, int], tuple[int, int]],
    stable_from: tuple[int, int],
    std_ms: Mapping[str, tuple[float, float, float]],
    stages: tuple[Mapping[str, tuple[int, int]], Mapping[str, tuple[int, int]]],
) -> Stated:
    """The first of each pair is of Llama 1b; the deviations are of the encoder, Llama 1b and Llama 3b."""
    names = (VISION, *PUBLISHED_MODELS)
    return Stated(
        dict(zip(PUBLISHED_MODELS, splits, strict=True)),
        dict(zip(PUBLISHED_MODELS, stable_from, strict=True)),
        {method: dict(zip(names, values, strict=True)) for method, values in std_ms.items()},
        dict(zip(PUBLISHED_MODELS, stages, strict=True)),
    )


def _stages(disttrain: tuple[int, int], entrain: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {"disttrain": disttrain, "dip": (8, 8), "entrain": entrain}


# In table 4.3 the deviations of Llama 1b repeat those of the encoder for all datasets but the first.
PUBLISHED: Mapping[str, PublishedShape] = {
    shape.name: shape
    for shape in (
        PublishedShape(
            SAMPLE_PRESETS["synthchartnet"],
            _stated(
                ((10, 6), (8, 8)),
                (64, 64),
                {
                    "disttrain": (208.07, 77.92, 164.55),
                    "dip": (102.13, 37.45, 84.36),
                    "entrain": (19.60, 18.79, 40.24),
                },
                (_stages((4, 4), (5, 3)), _stages((5, 3), (4, 4))),
            ),
        ),
        PublishedShape(
            SAMPLE_PRESETS["chartqa"],
            _stated(
                ((10, 6), (8, 8)),
                (16, 4),
                {
                    "disttrain": (61.34, 61.34, 35.44),
                    "dip": (73.42, 73.42, 40.56),
                    "entrain": (15.23, 15.23, 25.72),
                },
                (_stages((5, 3), (5, 3)), _stages((4, 4), (4, 4))),
            ),
        ),
        PublishedShape(
            SAMPLE_PRESETS["cocoqa"],
            _stated(
                ((10, 6), (8, 8)),
                (16, 4),
                {
                    "disttrain": (22.82, 22.82, 5.37),
                    "dip": (28.79, 28.79, 7.77),
                    "entrain": (22.11, 22.11, 5.52),
                },
                (_stages((4, 4), (5, 3)), _stages((4, 4), (3, 5))),
            ),
        ),
        PublishedShape(
            SAMPLE_PRESETS["llava-150k"],
            _stated(
                ((9, 7), (7, 9)),
                (64, 256),
                {
                    "disttrain": (17.98, 17.98, 32.92),
                    "dip": (14.82, 14.82, 33.27),
                    "entrain": (8.11, 8.11, 31.66),
                },
                (_stages((5, 3), (4, 4)), _stages((4, 4), (3, 5))),
            ),
        ),
    )
}
