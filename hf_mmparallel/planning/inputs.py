"""Inputs of the planner: the model's sizes, and sizes of samples."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, ModuleSpec, ParameterSpec, SampleSizes
from ..plan.methods import published_method
from ..plan.plugin import reject_unknown_keys
from .argument_types import positive
from .settings import Settings, named_pairs

GENERATOR_KEYS = ("layers", "hidden", "heads", "intermediate", "tokens")


@dataclass(frozen=True)
class ModelSource:
    """A model without its weights."""

    name: str  # what it was read from
    model: Any  # a [`~transformers.PreTrainedModel`] on the meta device
    spec: ModelSpec  # with generators; only parameters that adapters freeze are frozen
    generator_tokens: Mapping[str, int]  # generator -> tokens per sample

    @property
    def is_runnable(self) -> bool:
        """Whether a Trainer can run it."""
        return not self.generator_tokens


def read_model(source: str, plugins: Mapping[str, ModulePlugin], generators: list[str]) -> ModelSource:
    """
    Reads the model of a folder, a `config.json` or an id on the meta device, with the adapters of `plugins` and the
    values of `--generator`; raises `ValueError` if there is none, it is not supported, or lacks a named module.
    """
    path = Path(source)
    if not path.exists() and (source.startswith((".", "/")) or source.endswith(".json")):
        raise ValueError(f"`--model {source}` does not exist. Give a folder, a config.json or a model id.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"`--model {source}` is a folder without a config.json. Give the folder of a saved model.")
    if not path.exists():
        from ..data.dataset_sizes import check_hub

        check_hub("model", source, f"`--model {source}`", "Give a folder or a config.json")
    from ..modeling import build_model_spec, check_supported
    from ..modeling.adapter import add_adapters
    from ..modeling.loading import build_on_meta

    try:
        model = build_on_meta(source)
    except OSError as error:  # its message does not name the argument
        raise ValueError(
            f"`--model {source}` is not a folder here, and no configuration could be read from the Hub: "
            f"{str(error).partition(chr(10))[0]} Give a folder, a config.json or a model id."
        ) from error
    check_supported(model)
    spec = build_model_spec(model)
    adapters = {name: plugin.peft_config for name, plugin in plugins.items() if plugin.peft_config is not None}
    if adapters:
        add_adapters(model, spec, adapters)
        spec = build_model_spec(model)
    tokens = {}
    for text in generators:
        module, count = parse_generator(text, spec)
        tokens[module.name] = count
        spec = replace(spec, modules={**spec.modules, module.name: module})
    return ModelSource(source, model, spec, tokens)


def parse_generator(text: str, spec: ModelSpec) -> tuple[ModuleSpec, int]:
    """
    Reads `image:layers=28,hidden=3072,heads=24,intermediate=12288,tokens=1024`: a stack of transformer layers after
    the language model, such as a diffusion transformer. Returns the module and its tokens per sample, and raises
    `ValueError` if a size is missing or not a number, or the model has a module of this name.
    """
    example = "image:layers=28,hidden=3072,heads=24,intermediate=12288,tokens=1024"
    name, pairs = named_pairs("--generator", text, example)
    reject_unknown_keys("`--generator`", list(pairs), GENERATOR_KEYS)
    missing = [key for key in GENERATOR_KEYS if key not in pairs]
    if missing:
        raise ValueError(f"`--generator {text}` lacks `{missing[0]}`. It must look like `{example}`.")
    if name in spec.modules:
        raise ValueError(f"`--generator {name}`: the model has a module of this name. Choose another one.")
    try:
        sizes = {key: positive(value) for key, value in pairs.items()}
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"`--generator {text}`: {error}") from error
    width, inner, heads, num_layers = (sizes[key] for key in ("hidden", "intermediate", "heads", "layers"))
    if width % heads:
        raise ValueError(
            f"`--generator {name}`: `heads={heads}` does not divide `hidden={width}`. Change one of them."
        )
    dtype = spec.language_model.parameters[0].dtype
    shapes = {
        **dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"), (width, width)),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    stack = f"{name}.layers"
    enter = ParameterSpec(f"{name}.proj_in.weight", (width, spec.language_model.hidden_size), -1, dtype)
    inside = tuple(
        ParameterSpec(f"{stack}.{layer}.{part}.weight", shape, layer, dtype)
        for layer in range(num_layers)
        for part, shape in shapes.items()
    )
    module = ModuleSpec(name, stack, num_layers, width, heads, heads, inner, (enter, *inside), tower=stack)
    return module, sizes["tokens"]


@dataclass(frozen=True)
class Samples:
    """Sizes of samples to plan for."""

    origin: str  # their source, as text
    measured: SampleSizes | None = None  # of a dataset; without them all samples are equal

    @property
    def are_alike(self) -> bool:
        return self.measured is None

    def sizes(self, source: ModelSource, settings: Settings) -> SampleSizes:
        """Returns sizes of the measured samples, or of one, with the tokens of the settings, that all are like."""
        tokens = {
            name: settings.seq_len if name == LANGUAGE_MODEL else settings.image_tokens for name in source.spec.modules
        }
        if self.measured is None:
            return SampleSizes.uniform({**tokens, **source.generator_tokens}, 1)
        sizes = self.measured
        generated = SampleSizes.uniform(source.generator_tokens, sizes.num_samples)
        tokens, squares = {**sizes.tokens, **generated.tokens}, {**sizes.squares, **generated.squares}
        return replace(sizes, tokens=tokens, squares=squares)


def read_samples(args: argparse.Namespace, source: ModelSource) -> Samples:
    """Reads the samples of `--dataset`; raises `ValueError` if it can't be read, or samples can't be measured."""
    if args.dataset is None:
        for name in ("token_columns", "processor", "split", "image_folder"):
            if getattr(args, name) is not None:
                raise ValueError(f"`--{name.replace('_', '-')}` has no effect without `--dataset`. Give both.")
        return Samples("all samples alike")
    known = [name for name in source.spec.modules if name not in source.generator_tokens]
    preset = published_method("sample presets").get(args.dataset.removeprefix("published:"))
    if preset is not None and not Path(args.dataset).exists():
        encoder = _image_encoder(args.dataset, source.spec, known)
        from ..data.image_rules import image_rule

        drawn = preset.draw_images(args.num_samples, args.seed).sizes(
            encoder, image_rule(source.model, source.spec, encoder)
        )
        return Samples(f"{args.num_samples:,} samples with sizes as published of {preset.name}", drawn)
    from ..data.dataset_sizes import measure_dataset

    spec = replace(source.spec, modules={name: source.spec.modules[name] for name in known})
    columns = None if args.token_columns is None else parse_columns(args.token_columns)
    dataset = measure_dataset(
        args.dataset,
        source.model,
        spec,
        columns,
        _processor(args.processor or source.name),
        args.split,
        args.num_samples,
        args.seed,
        args.image_folder,
    )
    drawn = dataset.sizes.num_samples
    count = f"all {drawn:,}" if drawn == dataset.num_samples else f"{drawn:,} of {dataset.num_samples:,}"
    return Samples(f"{count} samples of {args.dataset}, split {dataset.split}", dataset.sizes)


def _image_encoder(dataset: str, spec: ModelSpec, known: Sequence[str]) -> str:
    """The single encoder of a model for images and text; raises `ValueError` for other models."""
    encoders = [name for name in known if name != LANGUAGE_MODEL]
    if len(encoders) != 1 or all(feature.modality != "image" for feature in spec.modules[encoders[0]].features):
        raise ValueError(
            f"`--dataset {dataset}` has sizes of images and text; the model has {_listed(known)}. Give a dataset of "
            "your own, or leave it out and give `--seq-len` and `--image-tokens`."
        )
    return encoders[0]


def parse_columns(text: str) -> str | dict[str, str]:
    """Reads `length`, or `language_model=length,vision=patches`."""
    if "=" not in text:
        return text
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(module and equals and column for module, equals, column in pairs):
        raise ValueError(
            f"`--token-columns {text}` must be a column, or look like `language_model=length,vision=patches`."
        )
    return {module: column for module, _, column in pairs}


def _processor(source: str) -> Callable[[], Any]:
    """A function that loads the processor of a model."""
    folder = str(Path(source).parent) if source.endswith(".json") else source

    def load() -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(folder)

    return load


def _listed(names: Any) -> str:
    return " and ".join(f"`{name}`" for name in names)
