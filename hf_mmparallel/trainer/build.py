"""From a model and the arguments to an engine: settings of modules, the plan, this rank's part."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from safetensors import safe_open
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_utils import number_of_arguments

from .._files import readable
from ..arrange import plan_for_batch
from ..cost import CostModel, Hardware, device_from
from ..cost.analytic import DTYPE_BYTES
from ..cost.calibration import Calibration, costs_from, read_costs
from ..cost.profile import LayerProfile
from ..data.packing import ATTENTION
from ..data.randomness import seeded
from ..kernels.varlen_attention import use_varlen_attention
from ..modeling import build_model_spec, check_given_loss
from ..modeling.adapter import (
    Adapter,
    adapter_names,
    add_adapters,
    base_model_of,
    is_peft_model,
    mark_adapted,
    unwrap_peft_model,
    wrap_with_adapters,
)
from ..modeling.compiled_layers import Compilation
from ..modeling.float8 import check_float8
from ..modeling.loading import build_on_meta, check_equal_models, checkpoint_files, load_layers
from ..modeling.prepare import Recomputation
from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    Stage,
    StorageSettings,
    plan_for_model,
)
from ..plan.checkpointing import SELECTIVE, Checkpointing
from ..plan.other_configs import mesh_settings, num_ranks
from ..plan.plugin import reject_unknown_keys
from ..plan.resolve import as_trained
from ..planning.device_detection import device_of_ranks, tf32_is_on
from ..planning.possible_sizes import check_context, check_matrices
from ..runtime.engine import EngineOptions, ParallelEngine
from ..runtime.host_memory import check_host_memory, check_storage
from ..runtime.weight_placement import LoadFunction, load_nothing
from ..world import World
from .argument_table import LIGER_LOSSES
from .arguments import MultimodalTrainingArguments, check_global_batch, plain_layout
from .optimizer_groups import check_given
from .start_checks import check_model

logger = get_logger(__name__)

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def is_single_process(plugin: MultimodalParallelPlugin, world_size: int) -> bool:
    """Whether the stock Trainer runs: all sizes are 1 on one process, and nothing asks for more than it has."""
    planned = 1 if plugin.plan is None else plugin.plan.world_size
    modules = [*plugin.modules.values(), *(plugin.plan.modules.values() if plugin.plan is not None else ())]
    is_stock = not any(module.storage.needs_engine for module in modules)
    return world_size == planned == 1 and is_stock and all(m.num_ranks == 1 for m in plugin.modules.values())


def with_packing(plugin: MultimodalParallelPlugin | None) -> MultimodalParallelPlugin:
    """A layout whose language model has the attention function that keeps the samples of a row apart."""
    plugin = plugin or MultimodalParallelPlugin()
    module = plugin.modules.get(LANGUAGE_MODEL, ModulePlugin())
    if module.attn_implementation not in (None, ATTENTION):
        raise ValueError(
            f"`attn_implementation={module.attn_implementation!r}` of `{LANGUAGE_MODEL}` reads no words, so that the "
            f'samples of a packed row would see each other. Leave it out, or use "{ATTENTION}".'
        )
    return replace(plugin, modules={**plugin.modules, LANGUAGE_MODEL: replace(module, attn_implementation=ATTENTION)})


def apply_module_settings(model: PreTrainedModel, plugin: MultimodalParallelPlugin) -> ModelSpec:
    """Applies attention functions and frozen parameters to a whole model, in place."""
    spec = build_model_spec(model)
    reject_unknown_keys("The model", list(plugin.modules), list(spec.modules))
    _set_attention(model, spec, plugin.modules)
    is_changed = any(module.attn_implementation is not None for module in plugin.modules.values())
    for name, module in spec.modules.items():
        if module.is_encoder and plugin.modules.get(name, ModulePlugin()).attn_implementation is None:
            use_varlen_attention(model.get_submodule(module.tower))
    parameters = dict(model.named_parameters())
    adapters = adapter_names(parameters)
    for name, module in spec.modules.items():
        for parameter in module.with_frozen(plugin.modules.get(name, ModulePlugin()).freeze).parameters:
            # adapters that the model has are not frozen
            if not parameter.trainable and parameter.name not in adapters:
                parameters[parameter.name].requires_grad_(False)
                is_changed = True
    return build_model_spec(model) if is_changed else spec


def adapter_configs(model: Any, plugin: MultimodalParallelPlugin) -> dict[str, Any]:
    """Returns module -> its adapters' config, if it has one; raises `ValueError` if the model has adapters already."""
    configs = {name: m.peft_config for name, m in plugin.modules.items() if m.peft_config is not None}
    if configs and is_peft_model(model):
        raise ValueError(
            f"The model has adapters already, and `peft_config` of module `{next(iter(configs))}` would add more. "
            "Give the base model with `peft_config`, or the `PeftModel` without."
        )
    return configs


def checkpointing_settings(args: TrainingArguments) -> Recomputation:
    return Recomputation.from_arguments(args.activation_checkpointing_kwargs or {})  # type: ignore[arg-type]


def compilation_settings(args: TrainingArguments) -> Compilation | None:
    backend, mode = args.torch_compile_backend, args.torch_compile_mode
    return Compilation(backend or "inductor", mode) if args.torch_compile else None


def liger_kernels(args: TrainingArguments) -> dict[str, bool] | None:
    """Which kernels of Liger a model gets: those of its layers, not those of the loss; `None` if it gets none."""
    chosen = {**(args.liger_kernel_config or {}), **dict.fromkeys(LIGER_LOSSES, False)}
    return chosen if args.use_liger_kernel else None


def prepare_single_process(model: PreTrainedModel, plugin: MultimodalParallelPlugin, args: TrainingArguments) -> Any:
    """The model with all settings of its modules, for the stock Trainer; a `PeftModel` when a module has adapters."""
    configs = adapter_configs(model, plugin)
    check_global_batch(plugin.modules, args.per_device_train_batch_size * args.gradient_accumulation_steps)
    base: Any = base_model_of(model)
    spec = apply_module_settings(base, plugin)
    if plugin.plan is not None:
        plan_for_model(plugin, spec, 1)  # its checks
    for name in spec.modules:
        settings = [plugin.modules.get(name), plugin.plan.modules.get(name) if plugin.plan else None]
        again = next(filter(None, (part and part.activation_checkpointing for part in settings)), False)
        if again:
            tower: Any = base.get_submodule(spec.modules[name].tower)
            tower.activation_checkpointing_enable(**checkpointing_settings(args).of(again).as_arguments)
    if not configs:
        return model
    with seeded(args.seed):
        return wrap_with_adapters(model, spec, configs)


def whole_model(
    model: Any, given: dict[str, Any], plugin: MultimodalParallelPlugin | None, args: TrainingArguments
) -> Any:
    """A model for the stock Trainer with all settings of its modules, also those that a `model_init` of it makes."""
    whole = load_whole(model)
    if plugin is not None:
        check_given(given, plugin.modules)
    if plugin is not None and model is not None:
        return prepare_single_process(whole, plugin, args)
    if plugin is not None and given.get("model_init") is not None:
        given["model_init"] = _preparing_init(given["model_init"], plugin, args)
    return whole


def _preparing_init(
    model_init: Callable[..., Any], plugin: MultimodalParallelPlugin, args: TrainingArguments
) -> Callable[[Any], Any]:
    """A `model_init` whose models have all settings of their modules."""
    num_arguments = number_of_arguments(model_init)

    def prepared(trial: Any) -> Any:
        return prepare_single_process(model_init(*[trial] * num_arguments), plugin, args)

    return prepared


def load_whole(model: Any) -> Any:
    """A model that an id or a folder names, with all of its weights; other values as they are."""
    if not isinstance(model, (str, Path)):
        return model
    blank = build_on_meta(model)
    return type(blank).from_pretrained(model, dtype=blank.dtype)


def restore_renamed(model: Any, folder: str | Path | None) -> bool:
    """Loads a checkpoint whose keys are named as on the Hub; returns whether it was one."""
    if not isinstance(model, PreTrainedModel) or folder is None:
        return False
    if not Path(folder).is_dir():  # an id of the Hub is no checkpoint of a run
        return False
    try:
        files = checkpoint_files(folder)
    except ValueError:
        return False
    keys: set[str] = set()
    for file in files:
        with readable(file), safe_open(str(file), framework="pt") as reader:
            keys.update(reader.keys())
    if keys <= model.state_dict().keys():
        return False
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())
    return True


def _set_attention(model: PreTrainedModel, spec: ModelSpec, plugins: dict[str, ModulePlugin]) -> None:
    chosen = {}
    for name, plugin in plugins.items():
        if plugin.attn_implementation is None:
            continue
        config = model.get_submodule(spec.modules[name].tower).config
        keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is config]
        chosen[keys[0] if keys else ""] = plugin.attn_implementation
    if chosen:
        whole: Any = model
        whole.set_attn_implementation(chosen)


def prepare_context(model: PreTrainedModel, spec: ModelSpec, settings: ModulePlugin | None) -> None:
    """
    Gives the language model the attention function that ranks can share a row of tokens with; raises `ValueError` for
    a model that can't have it, or settings that ask for another.
    """
    chosen = None if settings is None else settings.attn_implementation
    if chosen not in (None, ATTENTION):
        raise ValueError(
            f"`attn_implementation={chosen!r}` of the language model can't be used with `cp_size` above 1: it does "
            f"not know of tokens on other ranks. Use `attn_implementation={ATTENTION!r}`, or leave it out."
        )
    check_context(model, spec)
    _set_attention(model, spec, {LANGUAGE_MODEL: ModulePlugin(attn_implementation=ATTENTION)})


def resolve_batch(args: MultimodalTrainingArguments, dp_size: int) -> int:
    """The samples of a global batch; raises `ValueError` for arguments that contradict each other."""
    derived = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size
    if args.global_batch_size is None:
        return derived
    if args.gradient_accumulation_steps > 1 and derived != args.global_batch_size:
        raise ValueError(
            f"`global_batch_size={args.global_batch_size}` contradicts `per_device_train_batch_size="
            f"{args.per_device_train_batch_size}` x `gradient_accumulation_steps={args.gradient_accumulation_steps}` "
            f"x {dp_size} copies = {derived}. Leave `gradient_accumulation_steps` out; microbatches follow from the "
            "rest."
        )
    return args.global_batch_size


def single_process_arguments(args: MultimodalTrainingArguments) -> MultimodalTrainingArguments:
    """The arguments of the stock Trainer for the same global batch."""
    global_batch_size = args.global_batch_size
    if global_batch_size is None:
        return args
    share = args.per_device_train_batch_size * args.world_size
    resolve_batch(args, args.world_size)
    if global_batch_size % share:
        raise ValueError(
            f"`global_batch_size={global_batch_size}` is no multiple of `per_device_train_batch_size="
            f"{args.per_device_train_batch_size}` x {args.world_size} processes. Use a "
            "`per_device_train_batch_size` that divides it."
        )
    args = copy.copy(args)
    args.gradient_accumulation_steps = global_batch_size // share
    return args


def plan_arguments(args: MultimodalTrainingArguments) -> MultimodalTrainingArguments:
    """A copy of the arguments in which the Trainer's own loop sees one batch a step and leaves the model alone."""
    args = copy.copy(args)
    args.gradient_accumulation_steps = 1
    args.activation_checkpointing = args.use_liger_kernel = False
    vars(args)["runs_plan"] = True
    return args


def arguments_of_plan(args: MultimodalTrainingArguments, plan: ParallelPlan) -> MultimodalTrainingArguments:
    """A copy of the arguments with the arrangement of samples that a plan was chosen with."""
    args = copy.copy(args)
    args.microbatch_assignment = plan.microbatch_assignment
    return args


@dataclass(frozen=True)
class PreparedModel:
    """A model with the settings of its modules, before it is laid out."""

    model: Any  # the whole model; on the meta device if each rank reads its part
    spec: ModelSpec  # with what is frozen and with adapters
    costs: CostModel  # of its layers, the same on all ranks
    source: str | Path | None = None  # id or folder that ranks read their parts from
    adapter: Adapter | None = None


def _source_of_blank(model: Any) -> str | None:
    """The id or folder with the weights of a model on the meta device."""
    is_blank = isinstance(model, PreTrainedModel) and all(parameter.is_meta for parameter in model.parameters())
    return (model.config.name_or_path or None) if is_blank else None


def with_mesh_of(model: Any, args: Arguments) -> Arguments:
    """The arguments with the layout that a model's configuration has, if they have none and no rank holds a share."""
    mesh = _mesh_of(model)
    if mesh is None or not isinstance(args, MultimodalTrainingArguments) or args.parallel is not None:
        return args
    if base_model_of(model).is_distributed_loading_by_transformers:
        return args  # the stock Trainer's
    args = copy.copy(args)
    args.parallel = plain_layout(mesh)
    logger.info(f"The layout is the `distributed_config` of the model's configuration, `parallel={args.parallel}`.")
    return args


def _mesh_of(model: Any) -> Any:
    """The mesh of several ranks in the configuration of a model; `None` if it has none."""
    mesh = getattr(getattr(model, "config", None), "distributed_config", None)
    return mesh if num_ranks(mesh) > 1 else None


def _check_mesh(model: Any, plugin: MultimodalParallelPlugin) -> None:
    mesh = _mesh_of(model)
    if mesh is None:
        return
    sizes = {f"`{key}={size}`" for key, size in (mesh_settings(mesh) or {}).items() if size != 1}
    named = ", ".join(sorted(sizes))
    if base_model_of(model).is_distributed_loading_by_transformers:
        raise ValueError(
            f"The model was loaded with `distributed_config` ({named}), and ranks hold shares of its weights. Give "
            "its id or folder to the Trainer, and the `DistributedConfig` as `parallel`."
        )
    if MultimodalParallelPlugin.from_any(mesh).to_dict() != plugin.to_dict():
        raise ValueError(
            f"The model's configuration has a `distributed_config` ({named}) that is not the layout in `parallel`. "
            "Leave one of them out."
        )


def prepare_model(
    model: Any, args: MultimodalTrainingArguments, plugin: MultimodalParallelPlugin, world: World
) -> PreparedModel:
    """
    Freezes parts of a model, adds adapters and sets attention functions, in place. Collective. A whole model is equal
    on all ranks; of an id or folder each rank reads only its weights.
    """
    _check_mesh(model, plugin)
    source = model if isinstance(model, (str, Path)) else _source_of_blank(model)
    configs = adapter_configs(model, plugin)
    whole: Any = build_on_meta(model) if isinstance(model, (str, Path)) else model
    adapter = None
    if is_peft_model(model):
        whole, adapter = unwrap_peft_model(model)
    if source is None:
        check_equal_models(whole, world)
    check_model(whole, is_searched=plugin.auto, compiles=args.torch_compile)
    kernels = liger_kernels(args)
    if kernels is not None:  # before layers of other ranks are replaced, which have nothing to put kernels in
        apply_liger_kernel(whole, kernels)
    spec = apply_module_settings(whole, plugin)
    if configs:
        with seeded(args.seed):  # replicas start from equal adapters
            adapter = add_adapters(whole, spec, configs)
        mark_adapted(whole, adapter)
        spec = build_model_spec(whole)
    return PreparedModel(whole, spec, costs_of(spec, args, world), source, adapter)


def build_engine(
    prepared: PreparedModel,
    args: MultimodalTrainingArguments,
    plugin: MultimodalParallelPlugin,
    world: World,
    # of each forward, such as autocast
    forward_context: Callable[[], AbstractContextManager],
    joins: bool = False,
    token_metrics: bool = False,
    loss_function: Callable[..., Any] | None = None,
) -> tuple[ParallelEngine, int]:
    """Prepares this rank's part of a model, in place; returns it and the size of a global batch. Collective."""
    spec, source = prepared.spec, prepared.source
    plan, global_batch_size = plan_and_batch(plugin, spec, args)
    if plan.modules[LANGUAGE_MODEL].cp_size > 1:
        prepare_context(prepared.model, spec, plugin.modules.get(LANGUAGE_MODEL))
    _check_same_plan(plan, world)
    check_matrices(spec, plan)
    check_storage(spec, plan)
    check_float8(plan, world.device, torch.bfloat16 if args.bf16 else prepared.model.dtype)
    check_host_memory(prepared.costs, plan, world)
    check_global_batch(plugin.modules, global_batch_size)
    if loss_function is not None:
        _check_loss_function(loss_function, prepared.model, plan, world.device)
    load: LoadFunction | None = None
    # A rank that joins gets its place in a plan, and its weights, later; until then it has all of the model, by itself
    # and without memory.
    if joins:
        plan, load = on_one_rank(plan, spec), load_nothing(world.device)
    elif source is not None:
        load = functools.partial(_load_layers, source, world.device)
    options = EngineOptions(
        label_smoothing=args.label_smoothing_factor,
        loss_function=loss_function,
        seed=args.seed,
        load=load,
        costs=prepared.costs,
        adapter=prepared.adapter,
        recomputation=checkpointing_settings(args),
        compilation=compilation_settings(args),
        forward_context=forward_context,
        module_settings=plugin.modules,
        token_metrics=token_metrics,
        can_change_plan=args.resilience is not None,
    )
    return ParallelEngine(prepared.model, spec, plan, world, options), global_batch_size


def _check_loss_function(function: Callable[..., Any], model: Any, plan: ParallelPlan, device: torch.device) -> None:
    cp_size = plan.modules[LANGUAGE_MODEL].cp_size
    if cp_size > 1:
        raise ValueError(
            f"`compute_loss_func` can't be used with `cp_size={cp_size}` of `{LANGUAGE_MODEL}`, whose ranks have the "
            "logits of parts of a row. Use `cp_size=1`, or leave the function out."
        )
    check_given_loss(function, model.config.get_text_config().vocab_size, device)


def _load_layers(
    source: str | Path, device: torch.device, model: Any, layers: Collection[Collection[str]]
) -> Iterator[Collection[str]]:
    """[`load_layers`] as a [`LoadFunction`]."""
    return load_layers(model, source, device, layers)


def on_one_rank(plan: ParallelPlan, spec: ModelSpec) -> ParallelPlan:
    """A plan with all of the model on one rank, and else as another plan."""
    modules = {
        name: replace(module, replicas=((Stage((0, spec.modules[name].num_layers), ((0,),)),),))
        for name, module in plan.modules.items()
    }
    count = plan.total_microbatches
    return as_trained(replace(plan, modules=modules, num_microbatches=count, replica_microbatches=None), spec)


def value_bytes(spec: ModelSpec, args: MultimodalTrainingArguments) -> int:
    """Bytes of a value of an activation: of half precision under autocast, else as the weights of layers."""
    if args.mixed_precision in ("bf16", "fp16"):  # of the arguments or of the launcher
        return 2
    return max((DTYPE_BYTES.get(p.dtype, 4) for p in spec.language_model.parameters), default=4)


def compute_dtype(spec: ModelSpec, args: MultimodalTrainingArguments) -> str:
    """The dtype of matrix products, a key of [`PEAK_OF_DTYPE`]: of autocast, else of the weights of layers."""
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(str(args.mixed_precision))
    if dtype is None:
        dtypes = {p.dtype for p in spec.language_model.parameters}
        dtype = next((half for half in ("bfloat16", "float16") if dtypes == {half}), "float32")
    return "tf32" if dtype == "float32" and tf32_is_on() else dtype


def costs_of(spec: ModelSpec, args: MultimodalTrainingArguments, world: World) -> CostModel:
    """The costs of layers by the device of all ranks and the profile of rank 0, if it is that of the model."""

    def read() -> tuple[Hardware | None, LayerProfile | Calibration | None]:
        path = args.layer_profile
        if path is not None and not Path(path).is_file():
            raise ValueError(f"`layer_profile={path!r}` is no file. Write one with `hf-mmparallel profile --output`.")
        described = None if args.gpu_spec is None else device_from("", args.gpu_spec)
        return described, None if path is None else read_costs(path)

    # the same on all ranks, which decide alike
    described, source = world.from_first_rank(read)
    device = (described or device_of_ranks(world)).computing_in(compute_dtype(spec, args))
    return costs_from(spec, device, value_bytes(spec, args), source)


def plan_and_batch(
    plugin: MultimodalParallelPlugin, spec: ModelSpec, args: MultimodalTrainingArguments
) -> tuple[ParallelPlan, int]:
    """The plan with the number of microbatches that the batch sizes give, and the samples of a global batch."""
    plan = _plan(plugin, spec, args)
    return plan, resolve_batch(args, plan.modules[LANGUAGE_MODEL].dp_size)


def _plan(plugin: MultimodalParallelPlugin, spec: ModelSpec, args: MultimodalTrainingArguments) -> ParallelPlan:
    if plugin.plan is None:
        plugin = replace(plugin, modules=recomputed(plugin, spec, args))
    draft = plan_for_model(plugin, spec, args.world_size)
    dp_size = draft.modules[LANGUAGE_MODEL].dp_size
    plan = plan_for_batch(draft, resolve_batch(args, dp_size), args.per_device_train_batch_size)
    if plugin.plan is None and plugin.num_microbatches not in (None, plan.num_microbatches):
        raise ValueError(
            f"`num_microbatches={plugin.num_microbatches}` contradicts the batch sizes, which give "
            f"{plan.num_microbatches}. Leave it out, or change `per_device_train_batch_size`."
        )
    if plugin.plan is not None:
        modules = {}
        for name, module in plan.modules.items():
            again, moves = _recomputation(module.activation_checkpointing, module.storage, plugin, name, args)
            storage = replace(module.storage, offload_activations=moves)
            modules[name] = replace(module, activation_checkpointing=again, storage=storage)
        plan = replace(plan, modules=modules)
    _check_compilable(plan, args)
    cp_size = plan.modules[LANGUAGE_MODEL].cp_size
    if args.neftune_noise_alpha is not None and cp_size > 1:
        raise ValueError(
            f"`neftune_noise_alpha={args.neftune_noise_alpha}` can't be used with `cp_size={cp_size}` of the language "
            "model: the noise is scaled by the length of a row, of which each rank embeds a part. Use `tp_size` or "
            "`pp_size`."
        )
    return plan


def _check_compilable(plan: ParallelPlan, args: TrainingArguments) -> None:
    for name, module in plan.modules.items() if args.torch_compile else ():
        if module.splits_backward:
            raise ValueError(
                f"`torch_compile=True` can't be used with `split_backward` of `{name}`: compiled layers compute all "
                "gradients of a backward at once. Leave one of them out, or use another schedule."
            )
        saving = {
            "offload_activations": module.storage.offload_activations,
            f"activation_checkpointing={SELECTIVE!r}": module.activation_checkpointing == SELECTIVE,
        }
        setting = next((setting for setting, is_chosen in saving.items() if is_chosen), None)
        if setting is not None:
            raise ValueError(
                f"`torch_compile=True` can't be used with `{setting}` of `{name}`: a compiled layer decides itself "
                "what it saves. Leave one of them out."
            )


def recomputed(
    plugin: MultimodalParallelPlugin, spec: ModelSpec, args: MultimodalTrainingArguments
) -> dict[str, ModulePlugin]:
    """The settings of all modules, with `activation_checkpointing` of the arguments and its `offload`."""
    result = {}
    for name in spec.modules:
        own = plugin.settings_of(name)
        again, moves = _recomputation(own.activation_checkpointing, own.storage, plugin, name, args)
        result[name] = replace(own, activation_checkpointing=again, offload_activations=moves)
    return result


def _recomputation(
    own: Checkpointing, storage: StorageSettings, plugin: MultimodalParallelPlugin, name: str, args: TrainingArguments
) -> tuple[Checkpointing, bool]:
    """What a module recomputes, and whether it keeps what is saved in host memory."""
    again = own or bool(args.activation_checkpointing)
    is_given = "offload_activations" in plugin.settings_of(name).named
    by_default = again is True and checkpointing_settings(args).offload and not is_given
    return again, storage.offload_activations or by_default


def _check_same_plan(plan: ParallelPlan, world: World) -> None:
    prints = world.all_gather(plan.fingerprint, "comparing the plans of the ranks")
    if len(set(prints)) > 1:
        rows = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(prints))
        raise ValueError(f"The ranks were given different plans ({rows}). Give all ranks the same `parallel`.")
