"""`parallel="auto"`: the best plan of the model, the training samples and the launched ranks, found on rank 0."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from accelerate.logging import get_logger
from transformers.trainer_utils import get_last_checkpoint

from ..arrange import plan_for_batch
from ..cost import CostModel, predicts_times
from ..cost.arrangement_choice import DEFAULT_ARRANGEMENT
from ..cost.stage_memory import GIB
from ..data.global_batches import GlobalBatch
from ..data.randomness import seeded
from ..data.size_sources import evenly_spaced
from ..data.streams import StreamWindow, is_stream
from ..modeling.expert_parallel import expert_peaks
from ..plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin, ParallelPlan, PlannedFor, SampleSizes
from ..plan.checkpointing import Checkpointing
from ..plan.methods import arrangement_name
from ..plan.plugin import OTHER_SIZES, SIZES, ZERO_STAGES
from ..plan.resolve import check_plan, check_trained, check_world_size
from ..planning.answer import Answer, Inputs
from ..planning.files import page_of, save_plan
from ..planning.inputs import ModelSource, Samples
from ..planning.page import write_page
from ..planning.possible_sizes import possible_sizes
from ..planning.problem import PlanningProblem, SearchResult
from ..planning.search import search_plans
from ..planning.settings import Settings
from ..planning.text import origins, print_labelled, summary
from ..runtime.host_memory import available_bytes
from .arguments import MultimodalTrainingArguments
from .build import PreparedModel, resolve_batch
from .engine_callback import not_worth_a_run
from .start_report import PlanReport, mean_tokens, size_origin, stderr_console
from .training_sizes import RunContext, TrainingSizes, allowed_bytes, representative_batch
from .training_steps import TrainingSteps

logger = get_logger(__name__)

# The plan in a checkpoint, and the settings of modules beside it.

SAVED_PLAN = "parallel_plan.json"


def check_same_settings(saved: Mapping[str, ModulePlugin], given: Mapping[str, ModulePlugin]) -> None:
    """Raises `ValueError` if a saved run freezes or adapts a module in another way than this one."""
    plain = ModulePlugin()
    for name, before in saved.items():
        now = given.get(name, plain)
        for key in ("freeze", "peft_config"):
            old, new = (module.beside_plan.get(key, getattr(plain, key)) for module in (before, now))
            if old != new:
                raise ValueError(f"It has `{key}={old!r}` of `{name}`, and this run `{key}={new!r}`.")


def warn_of_other_settings(folder: str | Path, modules: Mapping[str, ModulePlugin]) -> None:
    """Warns if the run that wrote a checkpoint froze or adapted a module in another way than this one."""
    path = Path(folder) / SAVED_PLAN
    if not path.is_file():
        return
    try:
        check_same_settings(MultimodalParallelPlugin.from_any(path).modules, modules)
    except ValueError as error:
        logger.warning(f"The run that wrote `{path}` was another one: {str(error)[0].lower()}{str(error)[1:]}")
    except (OSError, yaml.YAMLError) as error:
        logger.warning(f"`{path}` can't be read, so that its settings are not compared: {error}")


PLAN_FILE, PAGE = "plan.yaml", "plan.html"
_NUM_SAMPLES = 1024  # measured samples, unless a global batch has more; a sample may have to be read for it
_NUM_STREAMED = 256  # the same of a stream
_NUM_ROUTED, _ROUTING_LIMIT_S = 8, 20.0  # microbatches whose tokens choose experts, and how long that may take
_CPU_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # those whose step may be on the CPU
# Values of `optim` whose update of an element depends on nothing else, so that ranks may update slices (ZeRO).
_ELEMENTWISE_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


@dataclass(frozen=True)
class FoundPlan:
    """The plan and batch sizes that were found, broadcast to all ranks."""

    plan: ParallelPlan
    global_batch_size: int  # samples of an optimizer step
    microbatch_size: int  # samples of a microbatch of one language-model replica
    arrangement: str | None = None  # of batches; `None` for that of the arguments

    def apply(
        self, plugin: MultimodalParallelPlugin, args: MultimodalTrainingArguments
    ) -> tuple[MultimodalParallelPlugin, MultimodalTrainingArguments]:
        """The settings with the plan in place of `auto`, and a copy of the arguments with its batch sizes."""
        args = copy.copy(args)
        args.global_batch_size = self.global_batch_size
        args.per_device_train_batch_size = self.microbatch_size
        args.gradient_accumulation_steps = 1
        args.microbatch_assignment = args.microbatch_assignment or self.arrangement
        return replace(plugin, auto=False, plan=self.plan, schedule=self.plan.schedule), args


@dataclass(frozen=True)
class AutoSearch:
    """The search, as rank 0 knows it."""

    answer: Answer | None  # `None` if the plan comes from a checkpoint
    origin: str  # of the plan, a sentence

    @property
    def result(self) -> SearchResult | None:
        return None if self.answer is None else self.answer.result


def find_plan(
    prepared: PreparedModel,
    sizes: TrainingSizes,
    plugin: MultimodalParallelPlugin,
    args: MultimodalTrainingArguments,
) -> tuple[FoundPlan, AutoSearch | None]:
    """Searches on rank 0 for a plan, the same on all ranks, and returns the search there, too. Collective."""
    searched: list[AutoSearch] = []

    def find() -> FoundPlan:
        plan, search = _resumed_or_searched(prepared, sizes, plugin, args)
        searched.append(search)
        return plan

    plan = sizes.context.world.from_first_rank(find)
    return plan, searched[0] if searched else None


def _resumed_or_searched(
    prepared: PreparedModel,
    sizes: TrainingSizes,
    plugin: MultimodalParallelPlugin,
    args: MultimodalTrainingArguments,
) -> tuple[FoundPlan, AutoSearch]:
    """The plan of the checkpoint that is resumed, or of a search."""
    batch = resolve_batch(args, args.world_size)
    saved, origin = find_saved_plan(prepared, plugin, args)
    if saved is not None:
        size = -(-batch // saved.total_microbatches)
        saved = plan_for_batch(saved, batch, size)
        return FoundPlan(saved, batch, size, saved.microbatch_assignment), AutoSearch(None, origin)
    answer = _searched(prepared, sizes, plugin, args, batch)
    return FoundPlan(answer.plan, batch, answer.microbatch_size, answer.arrangement), AutoSearch(answer, origin)


def find_saved_plan(
    prepared: PreparedModel, plugin: MultimodalParallelPlugin, args: MultimodalTrainingArguments
) -> tuple[ParallelPlan | None, str]:
    """The plan of the checkpoint to resume from, if it fits ranks and given sizes, and a sentence about it."""
    folder: Any = args.resume_from_checkpoint
    if str(folder).lower() == "true":
        folder = get_last_checkpoint(str(args.output_dir))
    path = None if folder is None else Path(folder) / SAVED_PLAN
    if path is None or not path.is_file():
        return None, ""
    saved = MultimodalParallelPlugin.from_any(path)
    plan = saved.plan
    if plan is None:
        return None, f"`{path}` holds no plan; one is searched for."
    try:
        check_plan(plan, prepared.spec)
        check_world_size(plan, args.world_size)
        check_trained(plan, prepared.spec, plugin.modules)
        check_same_settings(saved.modules, plugin.modules)
        _check_fixed(plan, plugin)
    except ValueError as error:
        return None, f"The plan of {folder} is not taken, another one is searched for: {error}"
    return plan, f"The plan is that of {folder}, which training resumes from; nothing is searched for."


def _check_fixed(plan: ParallelPlan, plugin: MultimodalParallelPlugin) -> None:
    for given in (plugin.fixed_sizes, plugin.fixed_sharding, plugin.fixed_storage):
        for name, settings in given.items():
            module = plan.modules[name]
            sizes = {key: getattr(module, key) for key in (*SIZES, *OTHER_SIZES)}
            has = {**sizes, **asdict(module.sharding), **asdict(module.storage)}
            for key, value in settings.items():
                if has[key] != value:
                    raise ValueError(f"`{key}={value}` is set for `{name}`, and it has {has[key]}.")


def _searched(
    prepared: PreparedModel,
    sizes: TrainingSizes,
    plugin: MultimodalParallelPlugin,
    args: MultimodalTrainingArguments,
    batch: int,
) -> Answer:
    with seeded(args.seed):  # only this rank reads samples here
        samples = training_samples(sizes, batch)
        costs = prepared.costs.with_expert_peaks(_expert_peaks(prepared, sizes.context))
    memory_bytes = allowed_bytes(args, costs.device)
    checkpointing = _checkpointing(prepared, plugin, args)
    assert samples.measured is not None
    problem = PlanningProblem(
        _with_own_host(costs),
        samples.measured,
        args.world_size,
        batch,
        memory_bytes=memory_bytes,
        schedule=plugin.schedule,
        arrangement=args.microbatch_assignment,
        fixed=possible_sizes(prepared.model, prepared.spec, plugin),
        checkpointing=checkpointing,
        seed=args.seed,
        zero_stages=ZERO_STAGES if args.optim in _ELEMENTWISE_OPTIMIZERS else (0,),
        offloads=args.optim in _CPU_OPTIMIZERS,
        splits=not args.torch_compile,
    )
    result = search_plans(problem)
    best = result.best
    settings = Settings(
        gpus=args.world_size,
        gpu_type=costs.device.name,
        gpu_spec=args.gpu_spec,
        described=costs.device,
        global_batch_size=batch,
        schedule=plugin.schedule,
        memory_limit_gib=None if memory_bytes is None else memory_bytes / GIB,
        dtype=costs.device.dtype,
        packing=costs.packs_rows,
        plugin=plugin,
        sizes=problem.fixed,
        checkpointing=checkpointing,
    )
    name = getattr(prepared.model.config, "name_or_path", "") or type(prepared.model).__name__
    inputs = Inputs(ModelSource(name, prepared.model, prepared.spec, {}), samples, args.layer_profile, args.seed)
    size = best.microbatch_size
    arrangement = arrangement_name(best.candidate.arrangement)
    return Answer(settings, inputs, costs, best.predictions, batch, size, arrangement, result)


def _expert_peaks(prepared: PreparedModel, context: RunContext) -> dict[str, dict[int, float]]:
    """Module -> how unevenly tokens of training samples choose its experts; nothing where that can't be measured."""
    mixtures = {name: module.stack for name, module in prepared.spec.modules.items() if module.num_experts}
    if not mixtures or any(parameter.is_meta for parameter in prepared.model.parameters()):
        return {}
    size = context.args.per_device_train_batch_size
    try:
        return {
            name: expert_peaks(prepared.model, stack, _first_batches(context, size), _ROUTING_LIMIT_S)
            for name, stack in mixtures.items()
        }
    except Exception as error:  # a model and its samples may raise anything
        logger.warning(
            f"How tokens choose experts can't be measured ({error}). The search takes them to do so evenly; "
            "`parallel/expert_imbalance` in the log says how they do."
        )
        return {}


def _first_batches(context: RunContext, size: int) -> Iterator[dict[str, Any]]:
    """Batches without labels from all over the training set, or the first of a stream."""
    dataset, count = context.train_dataset, _NUM_ROUTED * size
    if is_stream(dataset):
        dataset = StreamWindow(dataset, context.args.seed)
        dataset.fetch(GlobalBatch(tuple(range(count))))
        indices = list(dataset.rows)
    else:
        indices = evenly_spaced(len(dataset), count)
    rows, collator = context.drop_columns(dataset, "Training")
    for start in range(0, len(indices), size):
        batch = collator([rows[index] for index in indices[start : start + size]])
        yield {name: value for name, value in batch.items() if name != "labels"}


def _with_own_host(costs: CostModel) -> CostModel:
    """The costs with the free memory of this host in place of that of the device's usual server."""
    device = costs.device
    if device.host_memory_gib is None:
        return costs
    return replace(costs, device=replace(device, host_memory_gib=available_bytes() / GIB))


def _checkpointing(
    prepared: PreparedModel, plugin: MultimodalParallelPlugin, args: MultimodalTrainingArguments
) -> dict[str, Checkpointing]:
    """Module -> what its layers recompute, where that is set."""
    key = "activation_checkpointing"
    own: dict[str, Checkpointing] = {
        name: module.activation_checkpointing
        for name, module in plugin.modules.items()
        if module.activation_checkpointing or key in module.named
    }
    if not args.activation_checkpointing:
        return own
    return {name: own.get(name) or True for name in prepared.spec.modules}


def training_samples(sizes: TrainingSizes, batch: int) -> Samples:
    """Sizes of samples from all over the training set, or of the first of a stream."""
    context = sizes.context
    dataset = context.train_dataset
    if dataset is None:
        raise ValueError(
            '`parallel="auto"` plans for the training samples, and there is no `train_dataset`. Pass one, or give a '
            "layout, such as that of `hf-mmparallel plan`."
        )
    streamed = is_stream(dataset)
    if streamed:
        dataset = StreamWindow(dataset, context.args.seed)
    source = sizes.of_rank(dataset)
    start = sizes.at_start(dataset, batch) if getattr(source, "is_table", False) else None
    if start is not None:
        measured = start.draw(PlannedFor(seed=context.args.seed))
    else:
        count = max(batch, _NUM_STREAMED if streamed else _NUM_SAMPLES)
        samples = representative_batch(dataset, source, count, context.args).samples
        measured = source(samples) if source is not None and samples else None
    if measured is not None and measured.known and (measured.tokens[LANGUAGE_MODEL] > 1).any():
        which = "samples of the stream, the first" if streamed else "training samples"
        return Samples(f"{measured.num_samples:,} {which}, by {size_origin(context)}", measured)
    tokens = mean_tokens(context, dataset)
    if tokens is None:
        raise ValueError(
            'Nothing says the sizes of the training samples, which `parallel="auto"` plans for. Give `token_columns`, '
            "or `sample_tokens` to the Trainer."
        )
    return Samples("the mean of the first training samples, in place of each", SampleSizes.uniform(tokens, batch))


def report_plan(
    report: PlanReport, search: AutoSearch | None, steps: TrainingSteps, folder: Path | None = None
) -> str:
    """Prints a plan and the search for it; returns the arrangement of samples, if the arguments name none."""
    answer = None if search is None else search.answer
    shown = report.show(folder, None if answer is None else answer.inputs.samples.measured)
    steps.limits.has_warned = shown.large is not None and shown.large.num_over > 0
    if search is not None:
        report_search(search, folder)
    return DEFAULT_ARRANGEMENT if shown.choice is None else shown.choice.arrangement


def report_search(search: AutoSearch, folder: Path | None) -> None:
    """
    Prints the search and what bounds the step, and, with a folder, writes the plan as `plan.yaml`, which `parallel=`
    takes, and with the plans that it was chosen over as `plan.html`.
    """
    console = stderr_console()
    if search.origin:
        console.print(search.origin, highlight=False)
    answer, result = search.answer, search.result
    if answer is None or result is None:
        return
    lines = dict([*origins(answer), *summary(answer)])
    labels = ["Search", "Samples", "Costs", "Experts", "Memory", "Allocator", "Bound"]
    if predicts_times(answer.costs):
        labels[4:4] = ["Predicted step", "Throughput"]
    print_labelled(console, [(label, lines[label]) for label in labels if label in lines])
    if folder is None:
        return
    with not_worth_a_run("The plan"):
        folder.mkdir(parents=True, exist_ok=True)
        save_plan(str(folder / PLAN_FILE), answer, sys.argv)
        write_page(folder / PAGE, page_of(answer, sys.argv))
        console.print(f"Plan written to {folder / PLAN_FILE}, and as a page to {folder / PAGE}", highlight=False)
