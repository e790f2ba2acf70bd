"""Settings of a planning request: read from the arguments, changed by `--what-if`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..cost import MEMORY_SHARE, Hardware, device_from, find_device, usable_bytes
from ..cost.analytic import DTYPE_BYTES
from ..cost.devices import PEAK_OF_DTYPE
from ..cost.layers import PACKED_ATTENTION
from ..cost.stage_memory import GIB, gib_text
from ..plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, MultimodalParallelPlugin, PlannedFor
from ..plan.checkpointing import SELECTIVE, Checkpointing
from ..plan.methods import ARRANGEMENTS, SCHEDULES, Schedule
from ..plan.plugin import reject_unknown_keys
from .argument_types import positive

SHORT_NAMES = {
    "dp": "dp_size",
    "pp": "pp_size",
    "tp": "tp_size",
    "cp": "cp_size",
    "ep": "ep_size",
    "vp": "vp_size",
    "layers": "layers_per_stage",
    "colocate": "colocate_with",
    "checkpointing": "activation_checkpointing",
}
SIZES = ("dp_size", "pp_size", "cp_size", "tp_size")
Freeze = bool | str | list[str]


@dataclass(frozen=True)
class Settings:
    """Settings of a planning request."""

    gpus: int | None = None  # ranks
    gpu_type: str = PlannedFor.gpu_type  # the device of each rank
    gpu_spec: str | None = None  # file that describes that device
    described: Hardware | None = None  # that device, if it may differ from the table's
    global_batch_size: int | None = None  # samples of a step
    microbatch_size: int | None = None  # samples of a microbatch of one language model replica
    seq_len: int = PlannedFor.seq_len  # LM tokens per sample, without a dataset
    image_tokens: int = PlannedFor.image_tokens  # per sample in each encoder, without a dataset
    schedule: Schedule | None = None  # that of the layout by default
    microbatch_assignment: str | None = None  # arrangement of samples
    packing: bool | None = None  # whether microbatches of the language model are packed rows without padding
    memory_limit_gib: float | None = None  # of a rank
    dtype: str = PlannedFor.dtype  # of computation
    fused_kernels: bool = False  # whether norms and activation functions are one kernel each, see `OURS_FUSED`
    recomputed: Checkpointing | None = None  # what all modules recompute, if that is given
    # layouts and settings of modules that are given
    plugin: MultimodalParallelPlugin = field(default_factory=MultimodalParallelPlugin)
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # module -> its given sizes
    # module -> what its layers recompute, if that is given
    checkpointing: Mapping[str, Checkpointing] = field(default_factory=dict)

    @classmethod
    def of(cls, args: argparse.Namespace, **layout: Any) -> Settings:
        """Settings from the completed arguments of a command, see [`complete`], and its layout."""
        settings = cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}, **layout)
        if settings.microbatch_assignment is not None:
            reject_unknown_keys("`--microbatch-assignment`", [settings.microbatch_assignment], ARRANGEMENTS)
        device = device_from(settings.gpu_type, settings.gpu_spec)
        settings = replace(settings, gpu_type=device.name, described=device)
        for text in args.freeze:
            name, _, what = text.partition("=")
            settings = settings.with_frozen(name, what or True)
        return settings

    def planned_for(self, batch: int, microbatch_size: int, num_samples: int, seed: int) -> PlannedFor:
        """What a plan of these settings is made for."""
        given = {f.name: getattr(self, f.name) for f in fields(PlannedFor) if hasattr(self, f.name)}
        own = {"global_batch_size": batch, "microbatch_size": microbatch_size}
        return PlannedFor(**{**given, **own, "num_samples": num_samples, "seed": seed})

    @property
    def device(self) -> Hardware:
        device = self.described
        if device is None or device.name != self.gpu_type:
            device = find_device(self.gpu_type)
        return device.computing_in(self.dtype)

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation value."""
        return DTYPE_BYTES["float32" if self.dtype == "tf32" else self.dtype]

    @property
    def memory_bytes(self) -> float | None:
        """Memory of a rank that a plan has to fit; `None` if it is unknown."""
        return usable_bytes(self.device, self.memory_limit_gib)

    @property
    def memory_gib(self) -> float | None:
        """`memory_bytes` in GiB."""
        return None if self.memory_bytes is None else self.memory_bytes / GIB

    @property
    def memory_text(self) -> str:
        """The memory limit as text."""
        assert self.memory_bytes is not None
        if self.memory_limit_gib is not None:
            return f"{gib_text(self.memory_bytes)} GiB of the memory limit"
        return f"{gib_text(self.memory_bytes)} GiB, {MEMORY_SHARE:.0%} of the memory of {self.gpu_type}"

    @property
    def allocator_text(self) -> str:
        """Memory that predictions leave to the allocator, as text; empty if the device's memory is unknown."""
        if self.memory_limit_gib is not None:
            return "nothing reserved: the limit is for tensors, and a caching allocator reserves more than its tensors"
        total = self.device.memory_gib
        if total is None:
            return ""
        share = 1 - MEMORY_SHARE
        return (
            f"{share:.0%} of the device, {share * total:.3g} of {total:.4g} GiB, are left to the caching allocator's "
            "rounding and fragmentation, CUDA and its libraries; the memory above is that of tensors"
        )

    @property
    def packs_rows(self) -> bool | None:
        """Whether rows are packed; `None` if the model's default attention function decides."""
        chosen = self.plugin.modules.get(LANGUAGE_MODEL, ModulePlugin()).attn_implementation
        return self.packing if self.packing is not None or chosen is None else chosen == PACKED_ATTENTION

    @property
    def frozen(self) -> dict[str, Freeze]:
        """Module -> its frozen parameters."""
        return {name: module.freeze for name, module in self.plugin.modules.items() if module.freeze}

    def frozen_spec(self, spec: ModelSpec) -> ModelSpec:
        """The model with frozen parameters marked. Raises `ValueError` for modules that it does not have."""
        reject_unknown_keys("The model", list(self.plugin.modules), list(spec.modules))
        asking = next((name for name, module in self.plugin.modules.items() if module.float8 is not None), None)
        if asking is not None and (self.device.float8_speedup == 1 or self.dtype != "bfloat16"):
            raise ValueError(
                f"`float8` of `{asking}` replaces products in bfloat16 on devices with float8 products, not in "
                f"`{self.dtype}` on `{self.gpu_type}`. Leave it out, or use `dtype=bfloat16` and another device."
            )
        frozen = self.frozen
        modules = {name: module.with_frozen(frozen.get(name, False)) for name, module in spec.modules.items()}
        return replace(spec, modules=modules)

    def with_frozen(self, name: str, freeze: Freeze) -> Settings:
        """The same settings with a module frozen, or trained."""
        before = self.plugin.modules.get(name, ModulePlugin())
        module = replace(before, freeze=freeze, named=before.named | {"freeze"})
        modules = {**self.plugin.modules, name: module}
        return replace(self, plugin=replace(self.plugin, modules=modules, schedule=self.plugin.named_schedule))

    def with_changes(self, text: str) -> Settings:
        """
        Returns the settings of a `--what-if`, such as `frozen=vision,gpus=128`; raises `ValueError` if it can't be
        read.
        """
        changed = self
        for pair in text.split(","):
            key, equals, value = pair.partition("=")
            if not key or not equals or not value:
                raise ValueError(f"`--what-if {text}` must look like `frozen=vision,gpus=128`: `key=value` pairs.")
            reject_unknown_keys("`--what-if`", [key], [*CHANGES, "frozen", "trainable"])
            if key == "trainable":
                changed = changed.with_frozen(value, False)
            elif key == "frozen":
                name, _, what = value.partition(":")
                changed = changed.with_frozen(name, what or True)
            elif key in FIGURES:
                device = changed.device
                figure = FIGURES[key] or PEAK_OF_DTYPE[device.dtype]
                unit = getattr(device, figure) if value.endswith("x") else 1.0
                value = unit * _parsed(key, value.removesuffix("x"))
                changed = replace(changed, described=replace(device, **{figure: value}))
            else:
                described = {"gpu_spec": None} if key == "gpu_type" else {}
                changed = replace(changed, **{key: _parsed(key, value)}, **described)
        return changed


def _name_in(known: tuple[str, ...] | list[str]) -> Callable[[str], str]:
    """Returns a parser for one of several names."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"it is not one of {', '.join(known)}")
        return text

    return read


def _flag(text: str) -> bool:
    """Parses a boolean."""
    return _name_in(["true", "false"])(text) == "true"


def _positive_number(text: str) -> float:
    """Parses a number above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("it is not above 0")
    return value


# figures of the device that `--what-if` may change, to a number or, as `2x`, by a factor -> field of `Hardware`
FIGURES: Mapping[str, str | None] = {
    "peak_tflops": None,  # the one of the dtype
    "memory_gb_per_s": "memory_gb_per_s",
    "link_gb_per_s": "link_gb_per_s",
    "node_link_gb_per_s": "node_link_gb_per_s",
}

# settings that `--what-if` may change besides frozen modules -> parser of the value
CHANGES: Mapping[str, Callable[[str], Any]] = {
    "gpus": positive,
    "gpu_type": lambda text: find_device(text).name,
    "global_batch_size": positive,
    "microbatch_size": positive,
    "seq_len": positive,
    "image_tokens": positive,
    "schedule": _name_in(SCHEDULES),
    "microbatch_assignment": _name_in(ARRANGEMENTS),
    "memory_limit_gib": float,
    "dtype": _name_in(list(PEAK_OF_DTYPE)),
    "packing": _flag,
    "fused_kernels": _flag,
    "recomputed": lambda text: SELECTIVE if text == SELECTIVE else _flag(text),
    **dict.fromkeys(FIGURES, _positive_number),
}


def _parsed(key: str, value: str) -> Any:
    """Parses a value of [`CHANGES`]."""
    try:
        return CHANGES[key](value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"`--what-if {key}={value}`: {str(error).rstrip('.')}.") from error


def complete(args: argparse.Namespace, planned_for: PlannedFor | None = None) -> None:
    """Gives arguments that were not given the values that a plan was made for, or their defaults, in place."""
    stored = PlannedFor() if planned_for is None else planned_for
    if args.gpu_type is not None or args.gpu_spec is not None:
        stored = replace(stored, gpu_type=PlannedFor.gpu_type, gpu_spec=None)
    for name in (f.name for f in fields(stored)):
        if getattr(args, name) is None:
            setattr(args, name, getattr(stored, name))


def read_layout(args: argparse.Namespace) -> dict[str, Any]:
    """
    Reads `--parallel` or `--module` as the `plugin`, `sizes` and `checkpointing` of [`Settings`], and completes the
    arguments; raises `ValueError` if a file or value can't be read, or a module is named twice.
    """
    if args.parallel is not None:
        plugin = read_plugin(args.parallel)
    else:
        modules = {}
        for text in args.module:
            name, settings = module_settings(text)
            if name in modules:
                raise ValueError(f"`--module {name}` is given twice. Put all of its settings into one.")
            modules[name] = ModulePlugin.from_dict(settings)
        plugin = MultimodalParallelPlugin(modules)
    complete(args, plugin.planned_for)
    key = "activation_checkpointing"
    named = {name: module for name, module in plugin.modules.items() if key in module.named or getattr(module, key)}
    checkpointing = {name: module.activation_checkpointing for name, module in named.items()}
    return {"plugin": plugin, "sizes": plugin.fixed_sizes, "checkpointing": checkpointing}


def read_plugin(path: str) -> MultimodalParallelPlugin:
    """Reads settings of modules or a plan, YAML or JSON; raises `ValueError` with the location of an error."""
    import yaml

    try:
        return MultimodalParallelPlugin.from_any(path)
    except yaml.YAMLError as error:
        raise ValueError(f"`{path}` is not valid YAML: {error}. Correct it.") from error


def module_settings(text: str) -> tuple[str, dict[str, Any]]:
    """
    Reads `vision:dp=2,freeze=tower` as a module and fields of [`ModulePlugin`]; raises `ValueError` for another form.
    """
    name, pairs = named_pairs("--module", text, "vision:dp=2,tp=2")
    settings = {SHORT_NAMES.get(key, key): _value(value) for key, value in pairs.items()}
    layers = settings.get("layers_per_stage")
    if layers is not None:
        parts = str(layers).split("/")
        if not all(part.isdecimal() for part in parts):
            raise ValueError(
                f"`layers={layers}` must be numbers with slashes between them, such as `layers=10/12/12`."
            )
        settings["layers_per_stage"] = [int(part) for part in parts]
    return name, settings


def named_pairs(flag: str, text: str, example: str) -> tuple[str, dict[str, str]]:
    """Reads `name:key=value,key=value` of an argument; raises `ValueError` for another form."""
    name, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not name or not colon or not all(key and equals and value for key, equals, value in pairs):
        raise ValueError(f"`{flag} {text}` must look like `{example}`: a name, a colon, `key=value` pairs.")
    return name, {key: value for key, _, value in pairs}


def _value(text: str) -> Any:
    """Parses an integer, a boolean, or a string."""
    if text.isdecimal():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def has_all_sizes(settings: Settings, spec: ModelSpec, num_ranks: int) -> bool:
    """Whether a layout leaves nothing to search for; `num_ranks` are its ranks if omitted sizes are 1."""
    # a finished plan, or no number of GPUs
    if settings.plugin.plan is not None or settings.gpus is None:
        return True
    needed = {"dp_size", "pp_size", "tp_size"}  # of all modules
    if all(needed <= set(settings.sizes.get(name, ())) for name in spec.modules):
        return True
    colocated = {name for name, module in settings.plugin.modules.items() if module.colocate_with is not None}
    # or some sizes of each module that use all GPUs together
    return num_ranks == settings.gpus and all(name in settings.sizes or name in colocated for name in spec.modules)


def check_searchable(settings: Settings) -> None:
    """Raises `ValueError` for settings of modules that a search can't respect."""
    remedy = f"give the sizes of all modules, for {settings.gpus} ranks together"
    settings.plugin.check_searched(remedy)
