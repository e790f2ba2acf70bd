"""The user's settings of a layout: a `ModulePlugin` for each module, a `MultimodalParallelPlugin` for the model."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpointing import SELECTIVE, Checkpointing, read_checkpointing, why_not_selective
from .methods import SCHEDULES, Schedule
from .model_spec import LANGUAGE_MODEL
from .other_configs import deepspeed_settings, mesh_settings, read_deepspeed
from .parallel_plan import (
    CONTEXT_METHODS,
    CONTEXT_MODES,
    FLOAT8_RECIPES,
    ContextSettings,
    ModulePlan,
    ParallelPlan,
    ShardingSettings,
    StorageSettings,
)
from .planned_for import PlannedFor
from .reading import (
    plain_data,
    read_count,
    read_flag,
    read_list,
    read_mapping,
    read_name,
    read_number,
    reject_unknown_keys,
)

AUTO = "auto"
ZERO_STAGES = (0, 1, 2, 3)
SIZES = ("dp_size", "pp_size", "tp_size", "cp_size")  # whose product is the number of ranks
OTHER_SIZES = ("ep_size",)
CHOSEN_BY_SEARCH = (
    *("layers_per_stage", "vp_size", "split_backward", "colocate_with"),
    *("cp_method", "cp_mode", "cp_block"),
)
SHARDING = ("zero_stage", "shard_size", "reshard_after_forward")
STORAGE = tuple(f.name for f in dataclasses.fields(StorageSettings))
OFFLOADS = ("offload_optimizer", "offload_params", "offload_activations")
NOT_SEARCHED = ("deepspeed",)
# settings that a finished plan contains; the others are written beside the plan
HELD_BY_PLAN = (
    *(*SIZES, *OTHER_SIZES, *SHARDING, *STORAGE, "activation_checkpointing"),
    *(*CHOSEN_BY_SEARCH, *NOT_SEARCHED),
)


@dataclass
class ModulePlugin:
    """
    The layout and the settings of one module.

    Args:
        dp_size (`int`, *optional*, defaults to 1): Data-parallel copies.
        pp_size (`int`, *optional*, defaults to 1): Pipeline stages.
        tp_size (`int`, *optional*, defaults to 1): Ranks that share each layer's matrices.
        cp_size (`int`, *optional*, defaults to 1):
            Context-parallel ranks, which share a microbatch. Those of the language model share its tokens: the samples
            are packed into one row, and the attention function is `"bitfield"`. Those of an encoder share its images,
            frames and clips, each of which one rank computes.
        cp_method (`str`, *optional*, defaults to `"lpt"`):
            How tokens are assigned to ranks: by attention work, the heaviest block first (`"lpt"`), or one of the
            baselines `"zigzag"`, `"contiguous"` and `"random"`.
        cp_mode (`str`, *optional*, defaults to `"auto"`):
            `"row"` gathers all keys and values, `"segments"` only those of samples that are split over ranks; `"auto"`
            chooses the mode that is predicted to be faster.
        cp_block (`int`, *optional*, defaults to 128): Tokens per block, the unit that is assigned to a rank.
        ep_size (`int`, *optional*, defaults to 1):
            Ranks that share the experts of each layer of a mixture of experts, so many of the `dp_size * cp_size *
            tp_size` ranks of a stage: each has some of the experts whole, and tokens travel to theirs. A multiple of
            `tp_size`. With 1 each tensor-parallel group has a part of all experts.
        layers_per_stage (`list[int]`, *optional*): Number of layers of each stage; split evenly by default.
        vp_size (`int`, *optional*):
            Virtual stages of each of the `pp_size` ranks: stage `i` of `pp_size * vp_size` is on rank `i % pp_size` of
            the pipeline, so that the bubble is `vp_size` times smaller, for as many times the messages and some more
            activations. By default 1, and 2 under the schedule `"interleaved"` for modules with `pp_size` above 1 and
            at least four layers for each stage.
        split_backward (`bool`, *optional*):
            Whether stages send the gradients of their inputs before they compute those of the weights of their linear
            layers, which then fill the bubbles of the pipeline: inputs of these layers, and gradients of their
            outputs, stay that long. By default under `"zero_bubble"` and `"zero_bubble_h2"`, in stages where such
            weights are at least 15 % of the work of a backward and activations are not recomputed; `True` splits all
            others, too.
        freeze (`bool`, `str` or `list[str]`, *optional*, defaults to `False`):
            `True` freezes the module with its projector, `"tower"` everything but the projector; other strings are
            regular expressions, searched for in parameter names.
        activation_checkpointing (`bool` or `str`, *optional*, defaults to `False`):
            Whether layers save their inputs alone and recompute the rest in the backward. `"selective"` also keeps the
            outputs of matrix products and of attention, and recomputes norms, activation functions and the like.
        colocate_with (`str`, *optional*):
            Another module whose ranks this one shares, with sizes of its own whose product is the number of these
            ranks (`dp_size` is what remains, unless it is given), or, without any, those of the other one.
        peft_config (*optional*): `peft` config, or its dict, of the adapters in this module.
        attn_implementation (`str`, *optional*): Attention function, set in this module's config.
        zero_stage (`int`, *optional*, defaults to 0):
            What the `dp_size * cp_size` copies of a parameter divide among them: nothing (0), or the optimizer's
            state, its step and the sum of its gradients (1); also the gradients, which are summed in each backward
            (2); also the weights, which are gathered layer by layer in each forward and backward (3).
        shard_size (`int`, *optional*):
            Number of copies that divide it, such as those of a node; other groups of as many copies repeat it (hybrid
            sharding). All copies by default.
        reshard_after_forward (`bool`, *optional*, defaults to `True`):
            In ZeRO-3, whether the weights of a layer are freed after each forward and backward, and gathered again for
            the next. If not, they stay gathered from the first forward of a step to its last backward: fewer bytes
            are sent, and memory is saved between steps only.
        master_weights (`bool`, *optional*):
            Whether the optimizer updates a float32 copy of each trained bfloat16 or float16 weight, with the float32
            gradient, and rounds the result into the weight. By default it does; `False` lets it update the 16-bit
            weights, as the stock Trainer does.
        offload_optimizer (`bool`, *optional*, defaults to `False`):
            Whether the optimizer's state of this module is in host memory and its step runs on the CPU; Adam and AdamW
            only. With `deepspeed` installed the step is that of `DeepSpeedCPUAdam`.
        offload_params (`bool`, *optional*, defaults to `False`):
            Whether the frozen weights of layers are in host memory and come to the device one layer ahead of use.
        offload_activations (`bool`, *optional*, defaults to `False`):
            Whether what the layers of this module save for the backward, with `activation_checkpointing` their inputs,
            is in host memory until then. It travels beside the computation. `offload` of
            `activation_checkpointing_kwargs` is the default of modules that recompute.
        float8 (`str`, *optional*):
            Recipe of `torchao` by which the linear layers in the layers of this module multiply in float8 where they
            would in bfloat16: `"tensorwise"` is the fastest, `"rowwise"` rounds less, and `"rowwise_with_gw_hp"`
            computes gradients of weights in bfloat16. GPUs need compute capability 8.9, and `torch_compile=True` to be
            faster.
        learning_rate (`float`, *optional*):
            Learning rate of the module with its projector, at the top of the schedule, in place of that of the
            arguments; logged as `learning_rate/vision`.
        weight_decay (`float`, *optional*):
            Weight decay of the module, of those of its parameters that have any: no norms and biases.
        deepspeed (`str` or `dict`, *optional*):
            DeepSpeed configuration, as the path of its JSON file or as a dict. Its ZeRO stage and the offloading of
            its optimizer become settings of this module; batch sizes, clipping, precision and optimizer in it must be
            those of the arguments, or `"auto"`. Keys that can't be honoured are refused. The package `deepspeed` is
            not needed.
        named (`frozenset[str]`, *optional*):
            Names of the settings that were given explicitly, also with their default value; filled by
            [`~ModulePlugin.from_dict`]. A search does not change them.

    Example:

    ```python
    >>> vision = ModulePlugin(dp_size=2, freeze="tower")  # its projector is trained
    >>> language_model = ModulePlugin(layers_per_stage=[11, 11, 10], zero_stage=0)
    >>> language_model.pp_size
    3
    ```
    """

    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    layers_per_stage: list[int] | None = None
    vp_size: int | None = None
    split_backward: bool | None = None
    freeze: bool | str | list[str] = False
    activation_checkpointing: Checkpointing = False
    colocate_with: str | None = None
    peft_config: Any = None
    attn_implementation: str | None = None
    zero_stage: int = 0
    shard_size: int | None = None
    reshard_after_forward: bool = True
    master_weights: bool | None = None
    offload_optimizer: bool = False
    offload_params: bool = False
    offload_activations: bool = False
    float8: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    deepspeed: str | dict[str, Any] | None = None
    cp_method: str = "lpt"
    cp_mode: str = "auto"
    cp_block: int = 128
    named: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self):
        self._read_deepspeed()
        self._check_types()
        for name in (*SIZES, *OTHER_SIZES, "cp_block", "vp_size"):
            size = getattr(self, name)
            if name == "vp_size" and size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{name}={size!r}` must be a whole number of at least 1.")
        if self.layers_per_stage is not None:
            self.layers_per_stage = list(self.layers_per_stage)
            vp_size = self.vp_size or 1
            if self.pp_size == 1:
                self.pp_size = len(self.layers_per_stage) // vp_size
            stages = f"`pp_size={self.pp_size}` stages" + f" of each of `vp_size={vp_size}` rounds" * (vp_size > 1)
            if self.pp_size * vp_size != len(self.layers_per_stage) or min(self.layers_per_stage, default=0) < 1:
                raise ValueError(
                    f"`layers_per_stage={self.layers_per_stage}` must have one number of at least 1 for each of the "
                    f"{stages}."
                )
        if self.vp_size is not None and self.vp_size > 1 and self.pp_size == 1 and self.colocate_with is None:
            raise ValueError(
                f"`vp_size={self.vp_size}` has no effect with `pp_size=1`, whose rank has all layers. Leave it out, "
                "or use a `pp_size` above 1."
            )
        for name, known in (("cp_method", CONTEXT_METHODS), ("cp_mode", CONTEXT_MODES)):
            if getattr(self, name) not in known:
                reject_unknown_keys(f"`{name}`", [str(getattr(self, name))], known)
        self._check_sharding()
        hindrance = why_not_selective(self.cp_size, self.offload_params, self.offload_activations)
        if self.activation_checkpointing == SELECTIVE and hindrance is not None:
            setting, reason = hindrance
            raise ValueError(
                f"`activation_checkpointing={SELECTIVE!r}` can't be used with `{setting}`: {reason}. Use "
                "`activation_checkpointing=True`, or leave one of them out."
            )
        if self.split_backward and self.float8 is not None:
            raise ValueError(
                f"`split_backward=True` can't be used with `float8={self.float8!r}`, whose layers compute all "
                "gradients of a backward at once. Leave one of them out."
            )
        if self.cp_mode == "segments" and self.cp_method != "lpt":
            raise ValueError(
                f"`cp_method={self.cp_method!r}` assigns blocks to ranks, but `cp_mode='segments'` assigns whole "
                "samples. Use `cp_mode='row'`."
            )
        if self.cp_size == 1 and self.context != ContextSettings():
            raise ValueError(
                f"`{self.context}` has no effect with `cp_size=1`. Leave `cp_method`, `cp_mode` and `cp_block` out, "
                "or use a `cp_size` above 1."
            )

    def _read_deepspeed(self) -> None:
        """Takes the settings of a DeepSpeed configuration, unless one contradicts a given one."""
        if self.deepspeed is None:
            return
        self.deepspeed = read_deepspeed(self.deepspeed)
        settings = deepspeed_settings(self.deepspeed)
        defaults = {f.name: f.default for f in _settings(type(self))}
        for key, value in settings.items():
            given = getattr(self, key)
            if given != value and (given != defaults[key] or key in self.named):
                raise ValueError(
                    f"`{key}={given!r}` contradicts `deepspeed` beside it, which asks for {value!r}. Leave `{key}` "
                    "out."
                )
            setattr(self, key, value)

    def check_deepspeed_stages(self, name: str, num_stages: int) -> None:
        """Raises `ValueError` for a DeepSpeed configuration of ZeRO-3 of the module `name` with several stages."""
        if self.deepspeed is not None and self.zero_stage == 3 and num_stages > 1:
            raise ValueError(
                f"`zero_optimization.stage=3` in `deepspeed` of `{name}` can't be used with `pp_size={num_stages}`: "
                "DeepSpeed has no ZeRO-3 of a pipeline, whose forwards and backwards alternate. Use `zero_stage=3`, "
                "which this package runs in any order, in place of `deepspeed`."
            )

    def _check_sharding(self) -> None:
        """Raises `ValueError` for a ZeRO stage that is unknown, and a number of copies without one."""
        if self.zero_stage not in ZERO_STAGES:
            raise ValueError(
                f"`zero_stage={self.zero_stage}` does not exist. Use one of {', '.join(map(str, ZERO_STAGES))}."
            )
        if self.zero_stage == 3 and self.offload_params:
            raise ValueError(
                "`zero_stage=3` divides the weights that `offload_params=True` moves to host memory. Leave one of "
                "them out."
            )
        if self.zero_stage != 3 and not self.reshard_after_forward:
            raise ValueError(
                f"`reshard_after_forward=False` has no effect with `zero_stage={self.zero_stage}`, which divides no "
                "weights. Leave it out, or use `zero_stage=3`."
            )
        if self.shard_size is not None and not self.zero_stage:
            raise ValueError(
                f"`shard_size={self.shard_size}` has no effect with `zero_stage=0`. Leave it out, or use "
                "`zero_stage=1`."
            )

    def _check_types(self) -> None:
        """Raises `ValueError` for values of a wrong type and for invalid regular expressions."""
        if self.layers_per_stage is not None:
            for count in read_list(self.layers_per_stage, "`layers_per_stage`"):
                read_count(count, "An entry of `layers_per_stage`")
        read_checkpointing(self.activation_checkpointing, "`activation_checkpointing`")
        for name in ("reshard_after_forward", *OFFLOADS):
            read_flag(getattr(self, name), f"`{name}`")
        for name in ("master_weights", "split_backward"):
            if getattr(self, name) is not None:
                read_flag(getattr(self, name), f"`{name}`")
        read_count(self.zero_stage, "`zero_stage`")
        if self.shard_size is not None:
            read_count(self.shard_size, "`shard_size`", 1)
        for name in ("colocate_with", "attn_implementation", "float8"):
            if getattr(self, name) is not None:
                read_name(getattr(self, name), f"`{name}`")
        reject_unknown_keys("`float8`", [self.float8] if self.float8 else [], FLOAT8_RECIPES)
        for name in ("learning_rate", "weight_decay"):
            if getattr(self, name) is not None:
                setattr(self, name, read_number(getattr(self, name), f"`{name}`"))
                if self.freeze is True and self.peft_config is None:
                    raise ValueError(
                        f"`{name}={getattr(self, name)}` has no effect with `freeze=True`, which leaves nothing to "
                        "train. Leave one of them out."
                    )
        if isinstance(self.freeze, bool):
            return
        for pattern in [self.freeze] if isinstance(self.freeze, str) else read_list(self.freeze, "`freeze`"):
            try:
                re.compile(read_name(pattern, "A pattern of `freeze`"))
            except re.error as error:
                raise ValueError(f"`freeze={pattern!r}` is not a regular expression: {error}. Correct it.") from error

    @property
    def num_ranks(self) -> int:
        return self.dp_size * self.pp_size * self.tp_size * self.cp_size

    @property
    def context(self) -> ContextSettings:
        """How tokens are distributed over cp ranks."""
        return ContextSettings(self.cp_method, self.cp_mode, self.cp_block)

    @property
    def sharding(self) -> ShardingSettings:
        """What the copies of the module divide among them."""
        return ShardingSettings(self.zero_stage, self.shard_size, self.reshard_after_forward)

    @property
    def storage(self) -> StorageSettings:
        """Precision of the module's optimizer, and what of the module is in host memory."""
        return StorageSettings(**{key: getattr(self, key) for key in STORAGE})

    def to_dict(self) -> dict[str, Any]:
        """The settings that were given explicitly or differ from their defaults, as plain data."""
        result = {}
        for f in _settings(type(self)):
            value = getattr(self, f.name)
            if value != f.default or f.name in self.named:
                result[f.name] = value.to_dict() if hasattr(value, "to_dict") else value
        return result

    @property
    def beside_plan(self) -> dict[str, Any]:
        """The settings that a finished plan does not contain, as plain data."""
        return {name: plain_data(value) for name, value in self.to_dict().items() if name not in HELD_BY_PLAN}

    def check_against(self, name: str, plan: ModulePlan) -> None:
        """Raises `ValueError` for a setting that contradicts the plan of the module `name`."""
        planned = {
            "dp_size": plan.dp_size,
            "pp_size": plan.pp_size,
            "vp_size": plan.vp_size,
            "tp_size": plan.tp_size,
            "cp_size": plan.cp_size,
            "ep_size": plan.ep_size,
            "layers_per_stage": [stage.num_layers for stage in plan.replicas[0]],
            "split_backward": plan.splits_backward,
            "activation_checkpointing": plan.activation_checkpointing,
            **{f"cp_{key}": value for key, value in dataclasses.asdict(plan.context).items()},
            **dataclasses.asdict(plan.sharding),
            **dataclasses.asdict(plan.storage),
        }
        given = self.to_dict()
        self.check_deepspeed_stages(name, planned["pp_size"])
        if self.colocate_with is not None:
            raise ValueError(
                f"`colocate_with={self.colocate_with!r}` of `{name}` has no effect beside a plan, which already says "
                "which modules share ranks. Leave it out."
            )
        for key, value in planned.items():
            if key in given and given[key] != value:
                raise ValueError(
                    f"`{key}={given[key]!r}` of `{name}` contradicts the plan beside it, which has {value!r}. Leave "
                    f"`{key}` out, or change the plan."
                )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | ModulePlugin) -> ModulePlugin:
        """Reads the settings of a module from plain values; raises `ValueError` for unknown ones."""
        if isinstance(data, ModulePlugin):
            return data
        reject_unknown_keys("A `ModulePlugin`", list(data), [f.name for f in _settings(cls)])
        return cls(**data, named=frozenset(data))


def _settings(cls: type[ModulePlugin]) -> list[dataclasses.Field]:
    """The fields that a user can set."""
    return [f for f in dataclasses.fields(cls) if f.name != "named"]


@dataclass
class MultimodalParallelPlugin:
    """
    The layout of a whole model.

    Args:
        modules (`dict[str, ModulePlugin]`): Settings by module; a module left out gets one rank of its own.
        schedule (`str`, *optional*):
            `"1f1b"`; `"eager"`, which is 1F1B with as many forwards ahead as memory allows; `"gpipe"`; or
            `"encoders_first"`: all encoder forwards, then the language model under 1F1B, then all encoder backwards.
            `"interleaved"` is 1F1B with two virtual stages on each rank of a pipeline, see `vp_size` of the modules;
            `"zero_bubble"` is 1F1B whose backwards are split, see `split_backward` of the modules, and
            `"zero_bubble_h2"` the same with forwards ahead as far as memory goes.
            Defaults to `"1f1b"`; with `auto` the search chooses one of the first four.
        num_microbatches (`int`, *optional*):
            Microbatches of each language-model replica, for plans without a Trainer, which computes it itself.
        plan (`ParallelPlan`, *optional*): A finished plan; `modules` may then contain settings, but no sizes.
        auto (`bool`, *optional*, defaults to `False`):
            Whether the Trainer searches for the best plan for the model, the dataset and the launched ranks. Sizes
            given in `modules`, including 1, `activation_checkpointing`, the settings of ZeRO, `master_weights` and
            those of offloading are kept; the others are chosen. The string `"auto"` in place of a plugin means
            `auto=True` without further settings.
        share_ranks (`bool`, *optional*, defaults to `False`):
            Whether a module that is left out shares the ranks of the language model, with its `tp_size` and its
            settings of ZeRO, in place of one rank of its own. `DistributedConfig` of transformers and
            `ParallelismConfig` of accelerate are such layouts.
        planned_for (`PlannedFor`, *optional*):
            What a finished plan was made for: `hf-mmparallel simulate` predicts it for the same. The Trainer has its
            own batch and device.

    Raises:
        `ValueError`: For settings that contradict each other.

    Example:

    ```python
    >>> plugin = MultimodalParallelPlugin.from_any({"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}})
    >>> plugin.modules["vision"].dp_size
    2
    >>> args = MultimodalTrainingArguments("out", parallel=plugin)
    ```
    """

    modules: dict[str, ModulePlugin] = field(default_factory=dict)
    schedule: Schedule | None = None
    num_microbatches: int | None = None
    plan: ParallelPlan | None = None
    auto: bool = False
    share_ranks: bool = False
    planned_for: PlannedFor | None = None
    named_schedule: Schedule | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        self.named_schedule = self.schedule
        if self.schedule is not None and self.schedule not in SCHEDULES:
            reject_unknown_keys("`schedule`", [str(self.schedule)], SCHEDULES)
        for name, module in read_mapping(self.modules, "`modules`").items():
            read_name(name, "The name of a module")
            if module is not None and not isinstance(module, (ModulePlugin, Mapping)):
                raise ValueError(self._no_module(name, module))
        self.modules = {name: ModulePlugin.from_dict(module or {}) for name, module in self.modules.items()}
        if self.plan is not None and not isinstance(self.plan, ParallelPlan):
            raise ValueError(
                f"`plan={self.plan!r}` is not a plan. Leave it out; `auto: true` searches for the best one."
            )
        read_flag(self.auto, "`auto`")
        read_flag(self.share_ranks, "`share_ranks`")
        if self.share_ranks and (self.auto or self.plan is not None):
            raise ValueError(
                "`share_ranks=True` has no effect beside `plan` or `auto=True`, which say what shares ranks. Leave it "
                "out."
            )
        if self.num_microbatches is not None:
            read_count(self.num_microbatches, "`num_microbatches`", 1)
        if self.planned_for is not None:
            self.planned_for = PlannedFor.from_dict(self.planned_for)
        if self.schedule is None and not self.auto:
            self.schedule = "1f1b"
        if self.plan is not None:
            self.schedule = self.plan.schedule
            for name, module in self.modules.items():
                reject_unknown_keys("The plan", [name], list(self.plan.modules))
                module.check_against(name, self.plan.modules[name])
        if self.auto:
            self._check_auto()

    def _no_module(self, name: str, value: Any) -> str:
        """Why a key of `modules` is none, in one sentence."""
        if name in (f.name for f in dataclasses.fields(self) if f.init):
            return f"`{name}={value!r}` stands among the modules. Put these under `modules`, beside it."
        others = [f"`{key}`" for key, module in self.modules.items() if isinstance(module, (ModulePlugin, Mapping))]
        known = f" Known: {', '.join(others)}." if others else ""
        return f"`{name}={value!r}` must be a `ModulePlugin` or a dict of its settings.{known}"

    def _check_auto(self) -> None:
        """Raises `ValueError` for settings that a search can't respect."""
        for name in ("plan", "num_microbatches"):
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` is given, but `auto=True` chooses it. Leave one of them out.")
        self.check_searched("leave `auto=True` out and lay out all modules")

    def check_searched(self, remedy: str) -> None:
        """Raises `ValueError` for a setting that a search can't keep; `remedy` says what to do to keep it."""
        default = ModulePlugin()
        for name, module in self.modules.items():
            for key in (*CHOSEN_BY_SEARCH, *NOT_SEARCHED):
                value = getattr(module, key)
                if value != getattr(default, key):
                    cause = "is chosen by the search" if key in CHOSEN_BY_SEARCH else "is not known to the search yet"
                    raise ValueError(f"`{key}={value}` of `{name}` {cause}. Leave it out, or {remedy}.")

    @property
    def fixed_sizes(self) -> dict[str, dict[str, int]]:
        """Module -> its explicitly given sizes, which a search keeps."""
        return self._given((*SIZES, *OTHER_SIZES))

    @property
    def fixed_sharding(self) -> dict[str, dict[str, Any]]:
        """Module -> its explicitly given settings of ZeRO, which a search keeps."""
        return self._given(SHARDING)

    @property
    def fixed_storage(self) -> dict[str, dict[str, Any]]:
        """Module -> its explicitly given settings of precision and host memory, which a search keeps."""
        return self._given(STORAGE)

    def _given(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Module -> those of some settings that were given explicitly or differ from their defaults."""
        default, result = ModulePlugin(), {}
        for name, module in self.modules.items():
            values = {key: getattr(module, key) for key in keys}
            given = {key: own for key, own in values.items() if key in module.named or own != getattr(default, key)}
            if given:
                result[name] = given
        return result

    def settings_of(self, name: str) -> ModulePlugin:
        """The settings of a module of the model, also of one that is left out."""
        if name in self.modules or not self.share_ranks:
            return self.modules.get(name, ModulePlugin())
        host = self.modules.get(LANGUAGE_MODEL, ModulePlugin())
        kept = {key: getattr(host, key) for key in ("tp_size", *SHARDING)}
        # sizes of its own, `dp_size` is what remains
        return ModulePlugin(**kept, colocate_with=LANGUAGE_MODEL, named=frozenset({"tp_size", "pp_size", "cp_size"}))

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {"modules": {name: module.to_dict() for name, module in self.modules.items()}}
        for name in ("schedule", "num_microbatches", "plan", "auto", "share_ranks", "planned_for"):
            value = getattr(self, name)
            if value is not None and value is not False:
                result[name] = value.to_dict() if hasattr(value, "to_dict") else value
        return result

    @classmethod
    def from_any(cls, value: Any) -> MultimodalParallelPlugin:
        """
        Reads a value of `parallel=`: `"auto"`, a plugin, a dict of [`ModulePlugin`], the dict form of either, a JSON
        string, or the path of a YAML or JSON file with one of these or a saved [`ParallelPlan`]; or one mesh for all
        modules, a `DistributedConfig` of transformers or a `ParallelismConfig` of accelerate.
        """
        if isinstance(value, str) and value == AUTO:
            return cls(auto=True)
        if isinstance(value, MultimodalParallelPlugin):
            return value
        if isinstance(value, ParallelPlan):
            return cls(plan=value, schedule=value.schedule, num_microbatches=value.num_microbatches)
        if isinstance(value, (str, Path)):
            value = _read(value)
        mesh = mesh_settings(value)
        if mesh is not None:
            return cls(modules={LANGUAGE_MODEL: ModulePlugin.from_dict(mesh)}, share_ranks=True)
        if not isinstance(value, Mapping):
            raise ValueError(f'`parallel={value!r}` must be a dict of modules, a plan\'s file, a plugin or "auto".')
        if _is_plan(value):
            return cls.from_any(ParallelPlan.from_dict(value))
        if isinstance(value.get("plan"), Mapping):
            return cls._beside_plan(value)
        if isinstance(value.get("modules"), Mapping) or "plan" in value or isinstance(value.get(AUTO), bool):
            reject_unknown_keys("`parallel`", list(value), [f.name for f in dataclasses.fields(cls) if f.init])
            return cls(**value)
        return cls(modules=dict(value))

    @classmethod
    def _beside_plan(cls, value: Mapping[str, Any]) -> MultimodalParallelPlugin:
        """Reads a plan with settings of modules beside it, the format that a run saves."""
        known = [f.name for f in dataclasses.fields(cls) if f.init]
        value = read_mapping(value, "`parallel`", ["plan"], [name for name in known if name != "plan"])
        plan = ParallelPlan.from_dict(value["plan"])
        if value.get("schedule", plan.schedule) != plan.schedule:
            raise ValueError(
                f"`schedule={value['schedule']!r}` contradicts the plan beside it, which has {plan.schedule!r}. Leave "
                "one of them out."
            )
        return cls(**{"num_microbatches": plan.num_microbatches, **value, "plan": plan})


def _is_plan(value: Mapping[str, Any]) -> bool:
    """Whether plain data is a plan, possibly with mistakes, rather than settings."""
    modules = value.get("modules")
    if not isinstance(modules, Mapping) or "plan" in value:
        return False
    keys = [str(key) for module in modules.values() if isinstance(module, Mapping) for key in module]
    return "edges" in value or any(difflib.get_close_matches("replicas", [key]) for key in keys)


def _read(source: str | Path) -> Any:
    import yaml

    text = str(source)
    if text.lstrip().startswith("{"):
        return yaml.safe_load(text)
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f'`parallel={text!r}` is neither a file nor a JSON object. Give the path of a plan, a dict, or "auto".'
        )
    return yaml.safe_load(path.read_text())
