"""`TrainingArguments` with a layout for each module."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames, ParallelMode

from .._environment import joins_job, launch_settings, launched_processes, outlive_nccl_errors, tell_deepspeed_of_cpu
from ..plan import ModulePlugin, MultimodalParallelPlugin
from ..plan.methods import ARRANGEMENTS, arrangement_name
from ..plan.other_configs import entries, idle_keys
from ..plan.reading import plain_data, read_count, read_mapping, reject_unknown_keys
from ..world import limit_collectives, refuse_once

# The DeepSpeed configurations of modules agree with the arguments of the Trainer.

_ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)


def check_deepspeed(args: TrainingArguments, modules: Mapping[str, ModulePlugin]) -> None:
    """Raises `ValueError` for a value of a module's DeepSpeed configuration that contradicts the arguments."""
    values = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", args.per_device_train_batch_size),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "gradient_clipping": ("max_grad_norm", args.max_grad_norm),
        "bf16.enabled": ("bf16", args.bf16),
        "optimizer.params.lr": ("learning_rate", args.learning_rate),
        "optimizer.params.betas": ("adam_beta1`, `adam_beta2", [args.adam_beta1, args.adam_beta2]),
        "optimizer.params.eps": ("adam_epsilon", args.adam_epsilon),
        "optimizer.params.weight_decay": ("weight_decay", args.weight_decay),
    }
    for name, config in _configs(modules):
        for key, value in entries(config):
            if key in values:
                _check_equal(name, key, value, *values[key])
            elif key == "optimizer.type" and args.optim not in _ADAMW:
                raise ValueError(
                    f"`optimizer.type={value!r}` in `deepspeed` of `{name}` contradicts `optim="
                    f'{OptimizerNames(args.optim).value!r}`. Use `optim="adamw_torch"`, or remove `optimizer`.'
                )


def check_global_batch(modules: Mapping[str, ModulePlugin], global_batch_size: int) -> None:
    """Raises `ValueError` for a `train_batch_size` that is not the size of the global batch."""
    for name, config in _configs(modules):
        if "train_batch_size" in config:
            _check_equal(name, "train_batch_size", config["train_batch_size"], "global_batch_size", global_batch_size)


def check_own_loop(modules: Mapping[str, ModulePlugin]) -> None:
    """Raises `ValueError` for settings of a module's DeepSpeed configuration that belong to the user's own loop."""
    for name, config in _configs(modules):
        for key in ("optimizer", "scheduler", "gradient_clipping"):
            if config.get(key) not in (None, "auto"):
                raise ValueError(
                    f"`{key}={config[key]!r}` in `deepspeed` of `{name}` is for a Trainer: in a loop of your own the "
                    "optimizer, its schedule and clipping are yours. Remove it."
                )


def check_optimizer_class(modules: Mapping[str, ModulePlugin], given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an optimizer given to the Trainer beside that of a DeepSpeed configuration."""
    for name, config in _configs(modules):
        if config.get("optimizer") is not None and given.get("optimizer_cls_and_kwargs") is not None:
            raise ValueError(
                f"`optimizer_cls_and_kwargs` contradicts `optimizer` in `deepspeed` of `{name}`. Leave one of them "
                "out."
            )


def deepspeed_keys_without_effect(modules: Mapping[str, ModulePlugin]) -> Iterator[str]:
    for name, config in _configs(modules):
        if idle := idle_keys(config):
            yield (
                f"No effect in `deepspeed` of `{name}`: {', '.join(f'`{key}`' for key in idle)}. They tune or report "
                "what DeepSpeed itself runs."
            )


def _configs(modules: Mapping[str, ModulePlugin]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, module.deepspeed) for name, module in modules.items() if isinstance(module.deepspeed, Mapping)]


def _check_equal(name: str, key: str, value: Any, argument: str, given: Any) -> None:
    value = list(value) if isinstance(value, tuple) else value
    if value not in (None, "auto", given):
        raise ValueError(
            f"`{key}={value!r}` in `deepspeed` of `{name}` contradicts `{argument}={given!r}`. Make them equal, or "
            'write `"auto"`.'
        )


# The numbers of ranks that accelerate has.


def set_ranks(rank: int, size: int, local_rank: int) -> None:
    """Tells accelerate the numbers of this rank, of all and on its host, which it has read from the launcher."""
    for state in (PartialState, AcceleratorState):
        shared = state._shared_state
        if "num_processes" in shared:
            shared["num_processes"], shared["process_index"] = size, rank
            shared["local_process_index"] = local_rank


@dataclass(frozen=True)
class ResilienceSettings:
    """
    What a run has to survive.

    Args:
        failures (`int`, *optional*, defaults to 1):
            Nodes that may be lost at the same time without the loss of any layer; one more copy of the model than that
            is trained.
        ranks_per_node (`int`, *optional*):
            Ranks that are lost together. By default those of a host; on a single host each rank by itself.
    """

    failures: int = 1
    ranks_per_node: int | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ResilienceSettings:
        """Reads settings; raises `ValueError` for an unknown key, or a value that is no number or below 1."""
        data = read_mapping(data, "`resilience`", [], ["failures", "ranks_per_node"])
        values = {name: read_count(value, f"`{name}` of `resilience`", 1) for name, value in data.items()}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


ON_BAD_SAMPLE = ("raise", "skip")


T = TypeVar("T")
AUTO = "auto"  # the value of `memory_limit_gib` that lets the first steps correct the limit


def help_from_docstring(cls: type[T]) -> type[T]:
    """Gives the fields that a docstring has under `Args:` its text as the help of their flags."""
    for name, text in re.findall(r"^    (\w+) \(.*\):\n((?: {8}.*\n)+)", inspect.getdoc(cls) or "", re.MULTILINE):
        entry = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
        entry.metadata = {**entry.metadata, "help": " ".join(text.split()).replace("%", "%%")}
    return cls


@help_from_docstring
@dataclass
class MultimodalTrainingArguments(TrainingArguments):
    """
    The arguments of [`MultimodalParallelTrainer`]: those of `transformers.TrainingArguments`, and:

    Args:
        parallel (`dict` or `str`, *optional*):
            The layout: a dict of [`ModulePlugin`] by module, a [`MultimodalParallelPlugin`], the path of a YAML or
            JSON file, or a JSON string. `"auto"` searches for the best plan of the model, the training dataset and
            the launched ranks; `{"auto": True, "modules": {...}}` keeps the sizes of its modules. Without it the stock
            Trainer runs.
        global_batch_size (`int`, *optional*):
            Samples of an optimizer step, whatever the layout. By default `per_device_train_batch_size *
            gradient_accumulation_steps`, times the copies of the language model; times the number of ranks, as in the
            stock Trainer, with `parallel="auto"`, which chooses the samples of a microbatch itself.
        packing (`bool`, *optional*):
            Puts the samples of a microbatch one after the other in one row, without padding. The language model then
            runs `"bitfield"` attention, in which no sample sees another; losses and weights stay what they are. By
            default under a plan whose language model has this attention function.
        microbatch_assignment (`str` or `Callable`, *optional*):
            Arrangement of the samples of a global batch in replicas and microbatches under a plan; by default the one
            with the shortest predicted step. By their cost in each module, with work of the language model deferred
            by a microbatch where that evens it out (`"hierarchical"`), the same with small microbatches where the
            pipeline fills and drains (`"tapered"`), by Entrain's algorithm as published (`"entrain"`), in the
            sampler's order (`"contiguous"`), or as a baseline `"batch_rebalance"`, `"disttrain"` or
            `"sub_microbatches"`. Also a function of a module: from the `ParallelPlan`, the `Workloads` of the samples
            and the mean samples of a microbatch to encoder and language model -> replica -> microbatch -> tuple of
            batch indices, with the same result on every rank. The global batch and its gradient are the same with
            each. Without a plan `"hierarchical"`, `"batch_rebalance"`, `"disttrain"`, `"contiguous"` and functions
            arrange each global batch over the ranks and accumulation steps of DDP, FSDP or DeepSpeed; by default the
            stock Trainer makes its batches.
        token_columns (`str` or `dict`, *optional*):
            The dataset's column with the tokens of a sample in the language model, or a dict from module to column; a
            column holds numbers, or lists with the lengths of a sample's images. `"WIDTH*HEIGHT"` names two columns
            with the sides of images in pixels, for encoders of patches such as those of Qwen-VL, whose tokens
            `"LENGTH+vision"` adds to the lengths of texts. Without it sizes come from the dataset's metadata by the
            processor's rules.
        max_tokens_per_microbatch (`int`, *optional*):
            Maximum LM tokens per microbatch; the number of microbatches follows.
        memory_limit_gib (`float` or `"auto"`, *optional*):
            Memory of each rank in GiB that the estimate of a microbatch may fill; by default 90 % of the memory of a
            known GPU. `"auto"` starts from that and corrects it by the allocated memory of the first four steps.
        layer_profile (`str`, *optional*):
            File of `hf-mmparallel profile` with measured costs of the model's layers, or of `hf-mmparallel calibrate`
            with costs that runs have corrected; by default costs are counted from shapes.
        gpu_spec (`str`, *optional*):
            YAML file that describes the device of the ranks, as for `--gpu-spec` of the command line. By default a
            GPU of the table of devices is recognised, and another one is measured at the start, for about two seconds.
        log_predictions (`bool`, *optional*, defaults to `True`):
            Compares steps with their predictions: `parallel/predicted_...` in the log, a table in the model card, and
            `trainer_log.jsonl` in the output folder, for `hf-mmparallel calibrate`.
        on_bad_sample (`str`, *optional*, defaults to `"raise"`):
            `"raise"` ends the run with index and file of a sample that can't be read, `"skip"` leaves it out on all
            ranks, counts it and logs it.
        resilience (`dict`, *optional*):
            Lets training go on, in the same processes, when ranks are lost: `{"failures": 1}` survives the loss of any
            one node, see [`ResilienceSettings`]. Needs `hf-mmparallel launch`.
        async_save (`bool`, *optional*, defaults to `False`):
            Writes checkpoints under a plan while training goes on, which waits only for a copy of this rank's weights
            and optimizer state to host memory. The files are the same. The folder appears when all ranks have written,
            after `on_save`; the next save, the end of training and `load_best_model_at_end` wait for it, and raise
            what went wrong.
        save_on_preemption (`bool`, *optional*, defaults to `False`):
            SIGTERM or SIGUSR1 on any rank ends the training of all after their step, with a checkpoint. Without it,
            with `resilience`, the others go on without the node of that rank.
        mean_time_between_failures_h (`float`, *optional*, defaults to 24):
            Hours between two failures of any part of the job, for the advice after the first checkpoint on how often
            to save.

    Example:

    ```python
    >>> args = MultimodalTrainingArguments(
    ...     output_dir="out",
    ...     global_batch_size=64,
    ...     per_device_train_batch_size=4,
    ...     parallel={"vision": {"pp_size": 2}, "language_model": {"pp_size": 3}},  # on 5 ranks
    ... )
    ```
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "parallel", "token_columns", "resilience"]

    parallel: dict[str, Any] | str | None = None
    global_batch_size: int | None = None
    packing: bool | None = field(default=None, metadata={"nargs": "?", "const": True})
    microbatch_assignment: Callable[..., Any] | str | None = field(
        default=None, metadata={"choices": list(ARRANGEMENTS)}
    )
    token_columns: dict[str, str] | str | None = None
    max_tokens_per_microbatch: int | None = None
    memory_limit_gib: float | str | None = None
    layer_profile: str | None = None
    gpu_spec: str | None = None
    log_predictions: bool = True
    on_bad_sample: str = field(default="raise", metadata={"choices": list(ON_BAD_SAMPLE)})
    resilience: dict[str, Any] | str | None = None
    async_save: bool = False
    save_on_preemption: bool = False
    mean_time_between_failures_h: float = 24.0

    @cached_property
    def _setup_devices(self) -> torch.device:
        """The device; `ddp_timeout` holds on the CPU, too, where the stock arguments leave it out."""
        # by an `Accelerator` that is there already
        is_configured = getattr(self.accelerator_config, "use_configured_state", False)
        device = super()._setup_devices
        if self.use_cpu and not is_configured:
            limit_collectives(self.ddp_timeout_delta)
        return device

    @refuse_once()
    def __post_init__(self):
        if not torch.accelerator.is_available():
            tell_deepspeed_of_cpu()
            if launched_processes()[0] > 1:
                self.use_cpu = True  # accelerate forgets the launcher's choice when it starts several processes
        if self.parallel is not None:
            self.parallel = plain_layout(self.parallel)
        if self.resilience is not None:
            outlive_nccl_errors()
        super().__post_init__()
        if joins_job() and self.device is not None:
            settings: dict[str, Any] = launch_settings() or {}
            set_ranks(settings["id"], settings["num_processes"], settings["id"] - settings["first_id"])
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ValueError(f"`global_batch_size={self.global_batch_size}` must be at least 1.")
        _check_arrangement(self.microbatch_assignment)
        if self.on_bad_sample is not None:
            reject_unknown_keys("`on_bad_sample`", [str(self.on_bad_sample)], ON_BAD_SAMPLE)
        self.memory_limit_gib = _number_or_auto(self.memory_limit_gib)
        for name in ("max_tokens_per_microbatch", "memory_limit_gib", "mean_time_between_failures_h"):
            value = getattr(self, name)
            if value not in (None, AUTO) and value <= 0:
                raise ValueError(f"`{name}={value}` must be above 0.")
        if (plugin := self.plugin) is not None:
            check_deepspeed(self, plugin.modules)
        if self.resilience is not None:
            self.resilience = ResilienceSettings.from_dict(self.resilience).to_dict()  # type: ignore[arg-type]

    @property
    def row_packing(self) -> bool | None:
        """Whether the samples of a microbatch share a row."""
        return self.packing

    def to_dict(self) -> dict[str, Any]:
        """The arguments as plain values, with the name of a function."""
        values = super().to_dict()
        if callable(self.microbatch_assignment):
            values["microbatch_assignment"] = arrangement_name(self.microbatch_assignment)
        return values

    @property
    def parallel_mode(self) -> ParallelMode:
        """That of one process under a plan, whose losses and counts are those of all ranks already."""
        return ParallelMode.NOT_PARALLEL if vars(self).get("runs_plan") else super().parallel_mode

    @property
    def survives(self) -> ResilienceSettings | None:
        """What the run has to survive; `None` if it ends with any failure."""
        return None if self.resilience is None else ResilienceSettings.from_dict(self.resilience)  # type: ignore[arg-type]

    @property
    def plugin(self) -> MultimodalParallelPlugin | None:
        return None if self.parallel is None else MultimodalParallelPlugin.from_any(self.parallel)


def _check_arrangement(arrangement: Any) -> None:
    if not callable(arrangement):
        reject_unknown_keys("`microbatch_assignment`", [] if arrangement is None else [str(arrangement)], ARRANGEMENTS)
        return
    try:
        pickle.dumps(arrangement)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"`microbatch_assignment={arrangement_name(arrangement)}` can't be pickled, as workers of the data loader "
            f"and checkpoints need it: {error}. Use a function of a module."
        ) from error


def _number_or_auto(value: float | str | None) -> float | str | None:
    """A limit as a number, which a command line gives as text."""
    if not isinstance(value, str) or value == AUTO:
        return value
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"`memory_limit_gib={value!r}` is neither a number of GiB nor {AUTO!r}.") from error


def plain_layout(parallel: Any) -> dict[str, Any]:
    """The value of `parallel=` as the dict of a plugin, with types that JSON has."""
    try:
        layout = plain_data(MultimodalParallelPlugin.from_any(parallel).to_dict())
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = "" if where is None else f" at line {where.line + 1}, column {where.column + 1}"
        reason = getattr(error, "problem", None) or str(error)
        raise ValueError(
            f"`parallel={str(parallel)!r}` is no valid YAML or JSON{place}: {reason}. Mend it."
        ) from error
    json.dumps(layout)
    return layout
