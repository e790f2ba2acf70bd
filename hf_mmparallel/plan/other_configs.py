"""Configurations of other libraries as settings of modules: DeepSpeed's, and one mesh for a whole model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reading import read_count, read_mapping, reject_unknown_keys


@dataclass(frozen=True)
class Only:
    """A key that may have some values only, with a remedy for others."""

    values: tuple[Any, ...]
    remedy: str

    @property
    def typed_values(self) -> list[tuple[Any, bool]]:
        """The values, each with whether it is a flag, since `True` equals 1."""
        return [(value, isinstance(value, bool)) for value in self.values]


@dataclass(frozen=True)
class Refused:
    """A key that can't be honoured, with what to do in its place."""

    remedy: str


# This package does what a configuration asks for; DeepSpeed itself does not run under a plan. It would sum gradients
# in each backward, of which replicas may have different numbers, or all of them after the last one, and it clips by
# the norm of its own parameters.
HONOURED = "honoured"
IDLE = "idle"  # a key that changes how DeepSpeed computes or what it prints, but no result

_FLOAT32 = Only((None, "fp32"), "Gradients are summed in float32; leave it out.")
_OFF = Only((False, None), "Leave it out.")
_LEAVE_OUT = Refused("Leave it out.")
_ZERO, _OFFLOAD, _PARAMS = "zero_optimization", "zero_optimization.offload_optimizer", "optimizer.params"


def _named(section: str, names: str) -> list[str]:
    """The keys of a section, with its name before each."""
    return [section + name for name in names.split()]


# keys of a DeepSpeed configuration, with dots between sections; a name of a section stands for all that is in it
KEYS: Mapping[str, str | Only | Refused] = {
    "train_batch_size": HONOURED,
    "train_micro_batch_size_per_gpu": HONOURED,
    "gradient_accumulation_steps": HONOURED,
    "gradient_clipping": HONOURED,
    "bf16.enabled": HONOURED,
    "fp16.enabled": Only((False, "auto"), "Use `bf16=True`; a loss scaler lives in one backward."),
    f"{_ZERO}.stage": Only((0, 1, 2, 3), "Use 0, 1, 2 or 3."),
    f"{_OFFLOAD}.device": Only(
        ("none", "cpu", None), 'Use `"cpu"`; the state of an optimizer is in device or host memory.'
    ),
    f"{_OFFLOAD}.ratio": Only((1,), "The step is on the CPU or on the device; leave it out."),
    f"{_OFFLOAD}.super_offload": _OFF,
    f"{_ZERO}.offload_param.device": Only(
        ("none", None), "Leave `offload_param` out; stage 3 divides the weights over the copies of the module."
    ),
    "optimizer.type": Only(
        ("Adam", "AdamW", "adam", "adamw"), "Remove `optimizer`, and name the optimizer in the argument `optim`."
    ),
    **{f"{_PARAMS}.{name}": HONOURED for name in ("lr", "betas", "eps", "weight_decay")},
    f"{_PARAMS}.adam_w_mode": Only((True,), "Weight decay is that of AdamW; leave it out."),
    f"{_PARAMS}.bias_correction": Only((True,), "Leave it out."),
    f"{_PARAMS}.amsgrad": _OFF,
    f"{_PARAMS}.fp32_optimizer_states": Only((True,), "Leave it out."),
    f"{_PARAMS}.max_grad_norm": Refused("Use `gradient_clipping`."),
    "scheduler": Refused(
        "The Trainer's own schedule runs. Remove `scheduler` and use the argument `lr_scheduler_type`: "
        '`"constant_with_warmup"` for `WarmupLR`, `"linear"` for `WarmupDecayLR`, `"cosine"` for `WarmupCosineLR`.'
    ),
    "communication_data_type": _FLOAT32,
    "seq_parallel_communication_data_type": _FLOAT32,
    "data_types.grad_accum_dtype": _FLOAT32,
    "gradient_allreduce_op": Only(
        ("mean",), "Gradients are means over the target tokens of the global batch; leave it out."
    ),
    "bf16.bf16_master_weights_and_grads": _OFF,
    "bf16.bf16_optimizer_states": _OFF,
    f"{_ZERO}.zero_quantized_weights": _OFF,
    f"{_ZERO}.zero_quantized_nontrainable_weights": _OFF,
    f"{_ZERO}.zero_quantized_gradients": _OFF,
    f"{_ZERO}.zero_hpz_partition_size": Only((1,), "Use `shard_size` of the module."),
    f"{_ZERO}.zenflow": _LEAVE_OUT,
    f"{_ZERO}.cpu_offload": Only((False, None), 'Use `"offload_optimizer": {"device": "cpu"}`.'),
    f"{_ZERO}.cpu_offload_param": _OFF,
    f"{_ZERO}.legacy_stage1": _OFF,
    "fp16.fp16_master_weights_and_grads": _OFF,
    "activation_checkpointing": Refused("Use `activation_checkpointing` of the module."),
    "tensor_parallel": Refused("Use `tp_size` of the module."),
    "pipeline": Refused("Use `pp_size` of the module."),
    "sequence_parallel_size": Refused("Use `cp_size` of the language model."),
    "torch_autocast": Refused("Use `bf16=True`."),
    "amp": Refused("Use `bf16=True`."),
    "dataloader_drop_last": Refused("Use the argument `dataloader_drop_last`."),
    **dict.fromkeys(_named("", "comet csv_monitor tensorboard wandb"), Refused("Use the argument `report_to`.")),
    **dict.fromkeys(
        _named(
            "",
            "autotuning checkpoint compile compression_training curriculum_learning data_efficiency elasticity "
            "expert_parallel flops_profiler hybrid_engine sparse_attention sparse_gradients weight_quantization",
        ),
        _LEAVE_OUT,
    ),
    **dict.fromkeys(
        [
            *_named(
                "",
                "aio comms_logger disable_allgather disable_python_gc dump_state gradient_predivide_factor log_level "
                "managed_gradient_accumulation memory_breakdown prescale_gradients steps_per_print timers "
                "wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
            ),
            *_named("bf16.", "check_grad_overflow immediate_grad_update"),
            *_named(
                "fp16.",
                "auto_cast consecutive_hysteresis hysteresis initial_scale_power loss_scale loss_scale_window "
                "min_loss_scale",
            ),
            *_named("optimizer.", "legacy_fusion"),
            *_named(f"{_PARAMS}.", "foreach fused torch_adam"),
            *_named(
                f"{_OFFLOAD}.",
                "buffer_count cpuadam_cores_perc fast_init nvme_path pin_memory pipeline_read pipeline_write",
            ),
            *_named(f"{_ZERO}.offload_param.", "buffer_count buffer_size max_in_cpu nvme_path pin_memory"),
            *_named(
                f"{_ZERO}.",
                "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients "
                "cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters "
                "leaf_module load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear overlap_comm "
                "override_module_apply parameter_alignment pipeline_loading_checkpoint reduce_bucket_size "
                "reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory "
                "stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
                "stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance "
                "stage3_model_persistence_threshold stage3_module_granularity_threshold "
                "stage3_param_persistence_threshold stage3_prefetch_bucket_size "
                "stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce",
            ),
        ],
        IDLE,
    ),
}


def read_deepspeed(source: Any) -> dict[str, Any]:
    """Reads a dict or the path of a JSON file; raises `ValueError` for anything else and repeated keys."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise ValueError(f"`deepspeed={source!r}` must be the path of a JSON file, or a dict of its contents.")
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"`deepspeed={str(source)!r}` is no file. Give the path of a DeepSpeed configuration.")
    try:
        data = json.loads(path.read_text(), object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        raise ValueError(f"`deepspeed={str(source)!r}` is no valid JSON: {error}. Mend it.") from error
    return dict(read_mapping(data, f"`deepspeed={str(source)!r}`"))


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless a key is there twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`deepspeed` has `{twice}` twice. Keep one of them.")
    return result


def deepspeed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of [`ModulePlugin`] that a configuration asks for; raises `ValueError` for keys it can't honour."""
    values = dict(entries(config))
    for name, value in values.items():
        entry = KEYS[name]
        if isinstance(entry, Refused):
            raise ValueError(f"`{name}` of `deepspeed` can't be honoured under a plan. {entry.remedy}")
        if isinstance(entry, Only) and (value, isinstance(value, bool)) not in entry.typed_values:
            raise ValueError(f"`{name}={value!r}` of `deepspeed` can't be honoured under a plan. {entry.remedy}")
    settings: dict[str, Any] = {"zero_stage": values.get(f"{_ZERO}.stage", 0)}
    if values.get(f"{_OFFLOAD}.device") == "cpu":
        settings["offload_optimizer"] = True
    return settings


def idle_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a DeepSpeed configuration that change no result and nothing that this package does."""
    return [name for name, _ in entries(config) if KEYS[name] == IDLE]


def entries(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of [`KEYS`] that a configuration has, with their values; raises `ValueError` for others."""
    where = f"`{section}` of `deepspeed`" if section else "`deepspeed`"
    for key, value in read_mapping(config, where).items():
        name = f"{section}.{key}" if section else str(key)
        if name in KEYS:
            yield name, value
            continue
        if not any(known.startswith(f"{name}.") for known in KEYS):
            prefix = f"{section}." if section else ""
            known = {other[len(prefix) :].partition(".")[0] for other in KEYS if other.startswith(prefix)}
            reject_unknown_keys(where, [str(key)], sorted(known))
        if value is not None:
            yield from entries(value, name)


# One mesh for a whole model: `DistributedConfig` of transformers, `ParallelismConfig` of accelerate.

# key -> the setting of a module that it is; two of a row are multiplied
_SIZES = {
    "tp_size": "tp_size",
    "pp_size": "pp_size",
    "cp_size": "cp_size",
    "dp_replicate_size": "dp_size",
    "fsdp_size": "dp_size",
    "dp_shard_size": "dp_size",
    "ep_size": "ep_size",
}
_SHARDED = ("fsdp_size", "dp_shard_size")
_OWN = "tensor parallelism and sharding follow the model's own plan"
_REFUSED = {
    "ep_plan": (_OWN, "Leave it out"),
    "tp_plan": (_OWN, 'Use `"auto"`'),
    "fsdp_plan": (_OWN, "Leave it out"),
    "fsdp_cpu_offload": ("it moves weights, too", "Use `offload_optimizer` of modules in `parallel`"),
    "fsdp_mixed_precision": ("it is a setting of the whole run", "Use `bf16=True` of the arguments"),
    "sp_size": ("it is DeepSpeed's", "Use `cp_size`"),
}
_WITHOUT_EFFECT = {"enable_expert_parallel", "enable_sequence_parallel", "ep_implementation"}  # follow from the others
_WITHOUT_EFFECT |= {"cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler"}
_KNOWN = {*_SIZES, *_REFUSED, *_WITHOUT_EFFECT}


def mesh_settings(value: Any) -> dict[str, Any] | None:
    """
    The settings of each module on a mesh: copies, stages, shares of matrices and of tokens, ZeRO-3 where weights are
    sharded. `None` for a value that describes none; raises `ValueError` for what no setting of a module means.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name in _KNOWN}
    if not isinstance(value, Mapping) or not value.keys() & {*_SIZES} or not value.keys() <= _KNOWN:
        return None
    for key, (reason, remedy) in _REFUSED.items():
        given = value.get(key)
        if given is True or given not in (None, False, 1, "auto"):
            raise ValueError(f"`{key}={given!r}` of one mesh for the whole model can't be a plan: {reason}. {remedy}.")
    settings: dict[str, Any] = {}
    for key, name in _SIZES.items():
        if value.get(key) is not None:
            settings[name] = settings.get(name, 1) * read_count(value[key], f"`{key}`", 1)
    sharded = max((value.get(key) or 1 for key in _SHARDED), default=1)
    if sharded > 1:
        settings["zero_stage"] = 3
        if sharded < settings["dp_size"]:
            settings["shard_size"] = sharded * settings.get("cp_size", 1)
    return settings


def num_ranks(value: Any) -> int:
    """Ranks of a mesh; 1 for a value that describes none."""
    count = 1
    for key in _SIZES.keys() - {"ep_size"}:  # experts are shared by the ranks of the others
        size = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        count *= size or 1
    return count
