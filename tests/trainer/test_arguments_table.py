"""Every argument and method of the installed stock Trainer is honoured, refused or without effect under a plan."""

import functools
import inspect
import re
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import launch
from argument_figures import AS_STOCK, DIFFERS, FOR_SCRIPTS, TRAINER_AS_STOCK, TRAINER_DIFFERS
from transformers import Trainer, TrainingArguments, trainer_pt_utils, training_args

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin
from hf_mmparallel.trainer import argument_table as table
from hf_mmparallel.trainer import build, engine_state, start_checks
from hf_mmparallel.trainer.argument_table import ARGUMENTS, TRAINER_ARGUMENTS
from hf_mmparallel.trainer.start_checks import METHODS, Extends, NeverCalled, check_overrides
from tests import tiny
from tests.distributed import run_distributed
from tests.plan.specs import model_spec

from . import runs
from .contexts import arguments as make
from .moments import messages

LM = "language_model"
DOCS = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
REFUSED_IN_DOCS = DOCS.partition("## What a plan refuses")[2]
NAMES = {field.name for field in fields(TrainingArguments)}
SETTINGS = {field.name for field in fields(trainer_pt_utils.AcceleratorConfig)}


def of_kind(kind: type, entries: Any = ARGUMENTS) -> list[str]:
    return [name for name, entry in entries.items() if isinstance(entry, kind)]


def with_value(name: str, value: Any) -> MultimodalTrainingArguments:
    """Arguments with one value, which may be inside a field."""
    args = make()
    parent, _, own = name.rpartition(".")
    setattr(table.value_of(args, parent) if parent else args, own, value)
    return args


# What is honoured: a function that reads it under a plan -> the arguments, or their values that are not refused

HONOURED = {
    "CheckpointSaves._rotate": "save_total_limit",
    "DataProgress.training_values": "ignore_data_skip",
    "DefaultFlowCallback.on_step_end": "logging_strategy logging_first_step eval_strategy eval_delay save_strategy",
    "EngineState.push_saved": "push_to_hub",
    "Evaluator._metrics": "include_for_metrics",
    "Evaluator.run": "eval_do_concat_batches",
    "MultimodalParallelTrainer._clip_grad_norm": "max_grad_norm",
    "MultimodalParallelTrainer._write_checkpoint": "save_only_model",
    "MultimodalParallelTrainer._track_num_input_tokens": "include_num_input_tokens_seen",
    "MultimodalParallelTrainer.evaluation_loop": "prediction_loss_only",
    "MultimodalParallelTrainer.training_step": "torch_empty_cache_steps",
    "StepLoaders._data_seed": "data_seed",
    "StepLoaders._loader": "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context",
    "StepLoaders._seeded": "accelerator_config.use_seedable_sampler",
    "StepLoaders.evaluation": "per_device_eval_batch_size",
    "StepLoaders.training": "dataloader_drop_last",
    "Trainer.__init__": "use_cache disable_tqdm report_to full_determinism seed label_names skip_memory_metrics "
    "neftune_noise_alpha",
    "Trainer._determine_best_metric": "metric_for_best_model greater_is_better",
    "Trainer._finalize_training": "load_best_model_at_end",
    "Trainer._get_collator_with_removed_columns": "remove_unused_columns",
    "Trainer._get_output_dir": "output_dir",
    "Trainer._get_train_sampler": "train_sampling_strategy",
    "Trainer._inner_training_loop": "eval_on_start",
    "Trainer._load_callback_state": "restore_callback_states_from_checkpoint",
    "Trainer._run_epoch": "logging_nan_inf_filter",
    "Trainer.create_optimizer": "weight_decay",
    "Trainer.create_scheduler": "lr_scheduler_type lr_scheduler_kwargs",
    "Trainer.evaluate": "debug",
    "Trainer.get_optimizer_cls_and_kwargs": "learning_rate optim optim_args adam_beta1 adam_beta2 adam_epsilon",
    "Trainer.set_initial_training_values": "num_train_epochs max_steps",
    "TrainerState.compute_steps": "logging_steps eval_steps save_steps",
    "TrainingArguments.__post_init__": "bf16 tf32 gradient_checkpointing gradient_checkpointing_kwargs",
    "TrainingArguments._setup_devices": "use_cpu ddp_backend",
    "TrainingArguments.get_process_log_level": "log_level log_level_replica",
    "TrainingArguments.get_warmup_steps": "warmup_steps",
    "TrainingArguments.should_log": "log_on_each_node",
    "_recomputation": "activation_checkpointing",
    "build_engine": "label_smoothing_factor",
    "checkpointing_settings": "activation_checkpointing_kwargs",
    "compilation_settings": "torch_compile torch_compile_backend torch_compile_mode",
    "liger_kernels": "use_liger_kernel liger_kernel_config",
    "cast_for_evaluation": "bf16_full_eval fp16_full_eval",
    "resolve_batch": "per_device_train_batch_size gradient_accumulation_steps",
}
READERS = {name: reader for reader, names in HONOURED.items() for name in names.split()}
NOT_IN_THE_RUN = {
    "optim_target_modules", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
    "length_column_name", "ddp_timeout", "accelerator_config.use_configured_state",
}  # fmt: skip
"""What is honoured of optimizers, trackers, the Hub, datasets and devices that a run of these tests does without."""
READ_BY_ACCELERATE = {
    "ACCELERATE_USE_CPU", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE", "ACCELERATE_USE_SAGEMAKER"
}  # fmt: skip
OF_WHAT_IS_REFUSED = {
    "ACCELERATE_DYNAMO_MODE", "ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}  # fmt: skip
"""Variables that are read only if another one is set, which is refused."""

# The table is complete


def test_every_argument_has_an_entry():
    inside = {f"accelerator_config.{name}" for name in SETTINGS}
    kinds = [set(ARGUMENTS), set(DIFFERS), AS_STOCK, set(FOR_SCRIPTS)]
    assert set.union(*kinds) == NAMES - {"accelerator_config"} | inside
    assert sum(map(len, kinds)) == len(set.union(*kinds))
    honoured = {*AS_STOCK, *DIFFERS, *HELD_VALUES}
    assert honoured == set(READERS) | NOT_IN_THE_RUN and not NOT_IN_THE_RUN & set(READERS)
    own = {field.name for field in fields(MultimodalTrainingArguments)} - NAMES
    needing = {"microbatch_assignment", *table.NEED_AN_ARRANGEMENT, *table.NEED_A_PLAN}
    assert own == {"parallel", "global_batch_size", "packing", "save_on_preemption", *needing}
    parts = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert {*TRAINER_ARGUMENTS, *TRAINER_DIFFERS} == parts - TRAINER_AS_STOCK and parts > TRAINER_AS_STOCK
    stock = {name for name, value in vars(Trainer).items() if inspect.isroutine(value)}
    known = {*METHODS, *HELD}
    assert known == stock | {name for name in known if hasattr(Trainer, name)}
    assert not HELD & METHODS.keys()


def test_the_constructor_takes_what_the_stock_one_takes():
    data, collator = tiny.make_dataset("llama", 4), tiny.collate("llama")
    trainer = MultimodalParallelTrainer(tiny.FAMILIES["llama"](), make(), collator, data, data[:2])
    assert trainer.data_collator is collator and trainer.train_dataset is data and len(trainer.eval_dataset) == 2
    with pytest.raises(TypeError, match="multiple values for argument 'data_collator'"):
        MultimodalParallelTrainer(tiny.FAMILIES["llama"](), make(), collator, data_collator=collator)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokenizer'"):
        MultimodalParallelTrainer(tiny.FAMILIES["llama"](), make(), tokenizer=None)


# What is refused

REFUSED_VALUES: dict[str, Any] = {
    "optim": training_args.OptimizerNames.LOMO,
    "fp16": True,
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "torch_compile_backend": "cudagraphs",
    "torch_compile_mode": "reduce-overhead",
    "liger_kernel_config": {"rope": True, "fused_linear_cross_entropy": True},
    "auto_find_batch_size": True,
    "batch_eval_metrics": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "accelerator_config.split_batches": True,
    "accelerator_config.gradient_accumulation_kwargs": {"num_steps": 2},
    "parallelism_config": SimpleNamespace(total_size=2),
    "dataloader_in_order": False,
    "label_names": ["start_positions"],
    "train_sampling_strategy": "batch_rebalance",
    "fsdp": True,
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "debug": [training_args.DebugOption.UNDERFLOW_OVERFLOW],
}
REFUSED_PARTS = {"model_init": tiny.FAMILIES["llama"], "optimizers": (None, object())}
LAUNCHED = {
    "ACCELERATE_USE_FSDP": ("true", "false"),
    "ACCELERATE_USE_DEEPSPEED": ("true", "false"),
    "ACCELERATE_USE_MEGATRON_LM": ("true", "false"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("true", "false"),
    "ACCELERATE_MIXED_PRECISION": ("FP16", "bf16"),
    "ACCELERATE_DYNAMO_BACKEND": ("EAGER", "NO"),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": ("DATA_PARALLEL", "NO"),
}
"""Variable -> a value that is refused, and one that is not."""
HELD_VALUES: dict[str, Any] = {
    "optim": training_args.OptimizerNames.ADAMW_TORCH,
    "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2, "offload": True},
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "max-autotune-no-cudagraphs",
    "liger_kernel_config": {"rope": False, "cross_entropy": False},
    "label_names": ["labels"],
    "train_sampling_strategy": "group_by_length",
    "debug": [],
}


def test_every_refusal_has_a_case():
    assert set(REFUSED_VALUES) == set(of_kind(table.Refused))
    assert set(REFUSED_PARTS) == set(TRAINER_ARGUMENTS)
    set_there = set(re.findall(r"\bACCELERATE_\w+", inspect.getsource(launch)))
    known = {*table.LAUNCHER_VARIABLES, *READ_BY_ACCELERATE, *OF_WHAT_IS_REFUSED}
    assert known >= set_there - {"ACCELERATE_DEBUG_RDV_FILE"}  # of `debug_launcher`
    assert set(LAUNCHED) == set(table.LAUNCHER_VARIABLES)


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_what_cannot_hold_is_refused_with_a_remedy(name: str):
    args = with_value(name, REFUSED_VALUES[name])
    with pytest.raises(ValueError) as raised:
        table.check_arguments(args)
    sentence = str(raised.value)
    assert sentence.startswith(f"`{name}={table.value_of(args, name)!r}` can't be used with `parallel`: ")
    assert ARGUMENTS[name].reason in sentence and sentence.endswith(ARGUMENTS[name].remedy)
    table.check_arguments(make())
    if name in HELD_VALUES:
        table.check_arguments(with_value(name, HELD_VALUES[name]))


def of_a_batch(**changes: Any) -> Any:
    """Arguments of a global batch of six samples on three ranks."""
    sizes = {"world_size": 3, "global_batch_size": 6, "per_device_train_batch_size": 2}
    idle = {
        "gradient_accumulation_steps": 1,
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
    }
    return SimpleNamespace(**{**sizes, **idle, "torch_compile": False, "neftune_noise_alpha": None, **changes})


def test_compiled_layers_that_do_not_decide_what_they_save_are_refused():
    plugin = MultimodalParallelPlugin({"language_model": ModulePlugin(pp_size=2)}, schedule="zero_bubble")
    args = of_a_batch(torch_compile=True, activation_checkpointing_kwargs={"offload": True})  # of what recomputes
    with pytest.raises(ValueError, match="can't be used with `split_backward` of `language_model`"):
        build.plan_and_batch(plugin, model_spec(), args)
    # recomputed layers run whole backwards by default
    args.activation_checkpointing, args.torch_compile = True, False
    module = build.plan_and_batch(plugin, model_spec(), args)[0].modules["language_model"]
    assert not module.splits_backward and module.storage.offload_activations
    args.torch_compile = True
    with pytest.raises(ValueError, match="can't be used with `offload_activations` of `vision`"):
        build.plan_and_batch(plugin, model_spec(), args)
    given = {"vision": {}, "language_model": {"pp_size": 2}}
    plugins = {name: ModulePlugin.from_dict({**own, "offload_activations": False}) for name, own in given.items()}
    plugin = MultimodalParallelPlugin(plugins)
    build.plan_and_batch(plugin, model_spec(), args)
    kept = MultimodalParallelPlugin({**plugins, "vision": ModulePlugin(activation_checkpointing="selective")})
    with pytest.raises(ValueError, match="can't be used with `activation_checkpointing='selective'` of `vision`"):
        build.plan_and_batch(kept, model_spec(), args)
    args.torch_compile = False  # and what all modules recompute changes nothing of it
    vision = build.plan_and_batch(kept, model_spec(), args)[0].modules["vision"]
    assert vision.activation_checkpointing == "selective" and not vision.storage.offload_activations
    for words in ("`split_backward` of a module", "`torch_compile` with `offload_activations`"):
        assert words in REFUSED_IN_DOCS


def test_noise_on_the_embeddings_of_parts_of_rows_is_refused():
    plugin = MultimodalParallelPlugin({"language_model": ModulePlugin(cp_size=2)})
    args = of_a_batch(neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match="`neftune_noise_alpha=5.0` .*`cp_size=2`"):
        build.plan_and_batch(plugin, model_spec(), args)
    args.neftune_noise_alpha = None
    build.plan_and_batch(plugin, model_spec(), args)


def test_liger_replaces_layers_and_not_the_loss():
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # the second is on by default
    args = with_value("liger_kernel_config", {"rope": False})
    assert build.liger_kernels(args) is None
    args.use_liger_kernel = True
    assert build.liger_kernels(args) == {"rope": False, **losses}
    assert not build.plan_arguments(args).use_liger_kernel  # the stock loop would replace parts of what was pruned
    args.liger_kernel_config = None
    assert build.liger_kernels(args) == losses


def test_parts_of_a_trainer_that_cannot_hold_are_refused():
    for name, value in REFUSED_PARTS.items():
        with pytest.raises(ValueError, match=f"`{name}` can't be used with `parallel`: "):
            table.check_trainer_arguments({name: value})
    table.check_trainer_arguments({"optimizers": (None, None), "model_init": None})


@pytest.mark.parametrize("name", LAUNCHED)
def test_what_the_launcher_brings_is_refused_before_the_model_is_built(name: str, monkeypatch: pytest.MonkeyPatch):
    """Dynamo was left out unsaid, and a precision in capitals ended in `Attempted step but _scale is None`."""
    refused, held = LAUNCHED[name]
    entry = table.LAUNCHER_VARIABLES[name]
    monkeypatch.setenv(name, refused)
    with pytest.raises(ValueError) as raised:
        MultimodalParallelTrainer(model="no-such-model", args=make(parallel={LM: {"pp_size": 2}}))
    assert str(raised.value).startswith(f"`{name}={refused}`, ")
    assert str(raised.value).endswith(f"{entry.reason}. {entry.remedy}")
    monkeypatch.setenv(name, held)
    table.check_launcher(make(parallel={LM: {"pp_size": 2}}))


# What has no effect

IDLE_VALUES: dict[str, Any] = {
    "average_tokens_across_devices": False,
    "eval_use_gather_object": True,
    "eval_accumulation_steps": 4,
    "accelerator_config.dispatch_batches": True,
    "accelerator_config.even_batches": False,
    "accelerator_config.non_blocking": True,
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "fsdp_config": {"min_num_params": 1},
}


def test_what_has_no_effect_is_said():
    assert set(IDLE_VALUES) == set(of_kind(table.WithoutEffect))
    assert list(table.settings_idle_under_a_plan(make())) == []
    for name, value in IDLE_VALUES.items():
        (sentence,) = table.settings_idle_under_a_plan(with_value(name, value))
        assert sentence.startswith(f"`{name}={value!r}` ") and ARGUMENTS[name].reason in sentence
    for name in FOR_SCRIPTS:
        assert re.search(rf"\bargs\.{name}\b", inspect.getsource(transformers.trainer)) is None, name


# What is honoured

READ: dict[str, set[str]] = {}
CALLED: Counter[str] = Counter()


def note(name: str, known: set[str], prefix: str = "") -> None:
    if name in known:
        READ.setdefault(prefix + name, set()).add(sys._getframe(2).f_code.co_qualname)


class WatchedArguments(MultimodalTrainingArguments):
    """Arguments that keep which functions read them."""

    def __getattribute__(self, name: str) -> Any:
        note(name, NAMES)
        return super().__getattribute__(name)


class WatchedSettings(trainer_pt_utils.AcceleratorConfig):
    def __getattribute__(self, name: str) -> Any:
        note(name, SETTINGS, "accelerator_config.")
        return super().__getattribute__(name)


def counted(name: str, method: Any) -> Any:
    static = isinstance(method, staticmethod)
    inner = method.__func__ if static else method

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        CALLED[name] += 1
        return inner(*args, **kwargs)

    return staticmethod(wrapper) if static else wrapper


def watched_run(folder: Path) -> tuple[dict[str, set[str]], Counter[str], list[str]]:
    """A run that trains, evaluates, predicts, saves, loads the best and resumes; and what it warned of."""
    torch.set_num_threads(1)
    runs.draw_nothing()
    for cls in (Trainer, MultimodalParallelTrainer):
        for name, method in list(vars(cls).items()):
            if name in {*METHODS, *HELD}:
                setattr(cls, name, counted(name, method))
    start_checks._STOCK.update({name: vars(Trainer).get(name) for name in METHODS})  # counting replaces nothing
    warned = messages(engine_state.logger.name)
    given = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    given |= {"load_best_model_at_end": True, "remove_unused_columns": True, "gradient_checkpointing": True}
    given |= {"max_steps": -1, "num_train_epochs": 1, "global_batch_size": 6}
    args = WatchedArguments(
        output_dir=str(folder), parallel={LM: {}}, ddp_backend="gloo", per_device_train_batch_size=2,
        ddp_bucket_cap_mb=25, accelerator_config=WatchedSettings(), **{**runs.COMMON, **given},
    )  # fmt: skip
    data = tiny.make_dataset("llava", 12)
    trainer = MultimodalParallelTrainer(
        tiny.FAMILIES["llava"](), args, tiny.collate("llava"), data, data[:3], compute_metrics=lambda given: {"x": 1.0}
    )
    trainer.train()
    trainer.predict(data[:3])
    trainer.save_model()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return READ, CALLED, warned


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, set[str]], Counter[str], list[str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("watched"))
        return run_distributed(watched_run, 2, tmp_path_factory.mktemp("run"))


@pytest.mark.distributed
def test_what_is_honoured_is_read_by_the_function_that_the_table_names(watched: Any):
    read, _, _ = watched[0]
    for name, reader in READERS.items():
        assert reader in read.get(name, ()), (name, reader, read.get(name))


@pytest.mark.distributed
def test_what_has_no_effect_is_said_once_on_the_main_process(watched: Any):
    lines = [[line for line in warned if "ddp_bucket_cap_mb" in line] for _, _, warned in watched]
    assert [len(of_rank) for of_rank in lines] == [1, 0]


# Overridden methods

NOT_CALLED_IN_THE_RUN = {
    "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group", "log_metrics", "metrics_format",
    "save_metrics", "save_state", "end", "hyperparameter_search", "remove_callback", "call_model_init",
    "_tune_save_checkpoint", "_update_auto_batch_size", "create_optimizer_and_scheduler", "_remove_unused_columns",
    "init_hf_repo", "push_to_hub", "_push_from_checkpoint", "create_model_card", "get_cp_size", "get_tp_size",
    "__init__",
}  # fmt: skip
"""Methods that the user calls, or the Trainer for the Hub, for `datasets` and for what is refused."""
HELD = NOT_CALLED_IN_THE_RUN | {
    "add_callback", "pop_callback", "is_local_process_zero", "is_world_process_zero", "_validate_args",
    "_build_accelerator_args", "create_accelerator_and_postprocess", "num_examples", "_get_train_sampler",
    "_get_eval_sampler", "_set_signature_columns_if_needed", "_get_collator_with_removed_columns",
    "create_optimizer", "create_scheduler", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names",
    "_get_learning_rate", "train", "_prepare_for_training", "_run_epoch", "get_total_train_batch_size",
    "get_sp_size", "_hp_search_setup", "_report_to_hp_search", "compute_loss_context_manager",
    "autocast_smart_context_manager", "store_flos", "evaluate", "_evaluate", "predict", "_determine_best_metric",
    "_get_output_dir", "_save_rng_state", "_load_rng_state", "_load_scaler", "_load_callback_state", "log",
    "_finish_current_push",
}  # fmt: skip
"""Methods whose override runs as in the stock Trainer."""


@pytest.mark.distributed
def test_methods_are_called_as_the_table_says(watched: Any):
    _, called, _ = watched[0]
    assert [name for name in of_kind(NeverCalled, METHODS) if called[name]] == []
    idle = {name for name in HELD if not called[name]}
    assert idle <= NOT_CALLED_IN_THE_RUN, idle - NOT_CALLED_IN_THE_RUN
    extends = of_kind(Extends, METHODS)
    assert [name for name in extends if name not in vars(MultimodalParallelTrainer) or not called[name]] == []


HOOKS = sorted(name for name in vars(MultimodalParallelTrainer) if callable(getattr(Trainer, name, None)))
HOOKS = [name for name in HOOKS if name in {*METHODS, *HELD} - {"__init__"}]
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize("name", HOOKS)
def test_overrides_take_the_arguments_of_the_stock_methods(name: str):
    """A version of transformers that calls a hook in another way is told of here, not in the middle of a run."""
    ours = inspect.signature(vars(MultimodalParallelTrainer)[name])
    stock = [p for p in inspect.signature(getattr(Trainer, name)).parameters.values() if p.kind not in VARIABLE]
    names = [p.name for p in stock]
    bound = ours.bind(*names).arguments
    named = [p.name for p in ours.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert all(bound[own] == own for own in named if own in names)
    if all(p.kind is not p.VAR_POSITIONAL for p in ours.parameters.values()):  # else it passes on what it is given
        ours.bind(names[0], **{own: own for own in names[1:]})
    ours.bind(*(p.name for p in stock if p.default is p.empty))


def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
    return None


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(start_checks, "logger", SimpleNamespace(warning_once=lines.append))
    return lines


@pytest.mark.parametrize("where", ["in a subclass", "assigned", "in the stock class"])
@pytest.mark.parametrize("name", METHODS)
def test_overrides_that_a_plan_would_ignore_are_refused(
    name: str, where: str, warned: list[str], monkeypatch: pytest.MonkeyPatch
):
    ours, entry = MultimodalParallelTrainer, METHODS[name]
    cls = type("UserTrainer", (ours,), {name: replaced}) if where == "in a subclass" else ours
    assigned = [name] if where == "assigned" else ()
    start = f"`{name}` of this `MultimodalParallelTrainer`" if assigned else f"`UserTrainer.{name}`"
    if where == "in the stock class":
        monkeypatch.setattr(Trainer, name, replaced)
        start = f"`Trainer.{name}`"
    if isinstance(entry, Extends) and where != "in the stock class":
        check_overrides(cls, ours, assigned)
        (sentence,) = warned
    else:
        with pytest.raises(ValueError) as raised:
            check_overrides(cls, ours, assigned)
        sentence = str(raised.value)
    assert sentence.startswith(f"{start} is overridden") and entry.reason in sentence
    assert where == "in the stock class" or sentence.endswith(entry.remedy)


def test_overrides_that_hold_are_not_refused(warned: list[str]):
    ours = MultimodalParallelTrainer
    check_overrides(type("UserTrainer", (ours,), dict.fromkeys(HELD, replaced)), ours, HELD)
    check_overrides(ours, ours, ["model", "args"])
    assert warned == []


def test_trainers_of_other_libraries_that_are_mixed_in(warned: list[str]):
    ours = MultimodalParallelTrainer
    methods = {"SFTTrainer": "compute_loss", "LoggingTrainer": "log", "StepTrainer": "training_step"}
    sft, logging, step = (type(name, (Trainer,), {method: replaced}) for name, method in methods.items())

    def check(*bases: type) -> None:
        check_overrides(type("Mixed", bases, {}), ours)

    for bases, remedy in (((sft, ours), "Remove the override"), ((ours, sft), r"Use `parallelize\(SFTTrainer\)`")):
        with pytest.raises(ValueError, match=f"`SFTTrainer.compute_loss` .*{remedy}"):
            check(*bases)
    check(logging, ours)
    assert warned == []
    check(step, ours)
    assert len(warned) == 1 and warned[0].startswith("`StepTrainer.training_step` is overridden")
    with pytest.raises(ValueError, match="`StepTrainer.training_step` is overridden"):
        check(ours, step)  # it stands behind ours, which does not call it
