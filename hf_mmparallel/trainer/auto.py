"""`parallel="auto"`: the best plan of the model, the training samples and the launched ranks, found on rank 0."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers.trainer_utils import get_last_checkpoint

from ..arrange.contiguous import num_microbatches
from ..callbacks.base import not_worth_a_run
from ..cost.stage_memory import GIB
from ..data.loader import seeded
from ..data.streams import StreamWindow, is_stream
from ..page import write_page
from ..plan import LANGUAGE_MODEL, MultimodalParallelPlugin, ParallelPlan, SampleSizes
from ..plan.resolve import check_plan, check_trained, check_world_size
from ..planner.answer import Answer, Inputs
from ..planner.files import page_of, save_plan
from ..planner.inputs import ModelSource, Samples
from ..planner.possible_sizes import possible_sizes
from ..planner.settings import Settings
from ..planner.text import origins, print_labelled, print_runners_up, summary
from ..search.problem import PlanningProblem, SearchResult
from ..search.search import search_plans
from .arguments import MultimodalTrainingArguments
from .build import PreparedModel, resolve_batch
from .oversized_samples import allowed_bytes
from .saved_plan import SAVED_PLAN, check_same_settings
from .start_report import mean_tokens, size_origin, stderr_console
from .training_sizes import representative_draw

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer

logger = get_logger(__name__)

PLAN_FILE, PAGE = "plan.yaml", "plan.html"
_NUM_SAMPLES = 1024  # that are measured, unless a global batch has more; a sample may have to be read for it
_NUM_STREAMED = 256


@dataclass(frozen=True)
class FoundPlan:
    """
    What the ranks go on with, as with a plan that they were given.

    Args:
        plan (`ParallelPlan`): The plan.
        global_batch_size (`int`): Samples of an optimizer step.
        microbatch_size (`int`): Samples of a microbatch of one language-model replica.
        method (`str`, *optional*): How batches are arranged; `None` for what the arguments say.
    """

    plan: ParallelPlan
    global_batch_size: int
    microbatch_size: int
    method: str | None = None

    def applied(
        self, plugin: MultimodalParallelPlugin, args: MultimodalTrainingArguments
    ) -> tuple[MultimodalParallelPlugin, MultimodalTrainingArguments]:
        """The settings with the plan in place of `auto`, and a copy of the arguments with its batch sizes."""
        args = copy.copy(args)
        args.global_batch_size = self.global_batch_size
        args.per_device_train_batch_size = self.microbatch_size
        args.gradient_accumulation_steps = 1
        args.microbatch_assignment = args.microbatch_assignment or self.method
        return replace(plugin, auto=False, plan=self.plan, schedule=self.plan.schedule), args


@dataclass(frozen=True)
class AutoSearch:
    """
    What rank 0 knows of the search.

    Args:
        answer (`Answer`, *optional*): The plan with its prediction; `None` if it comes from a checkpoint.
        origin (`str`): Where the plan comes from, a sentence.
    """

    answer: Answer | None
    origin: str

    @property
    def result(self) -> SearchResult | None:
        return None if self.answer is None else self.answer.result


def find_plan(
    trainer: MultimodalParallelTrainer,
    prepared: PreparedModel,
    plugin: MultimodalParallelPlugin,
    args: MultimodalTrainingArguments,
) -> tuple[FoundPlan, AutoSearch | None]:
    """
    Searches for a plan on rank 0. Collective.

    Args:
        trainer ([`MultimodalParallelTrainer`]): The Trainer, with the whole model and without an engine.
        prepared ([`PreparedModel`]): The model with the settings of its modules.
        plugin (`MultimodalParallelPlugin`): These settings, and the sizes that are set.
        args ([`MultimodalTrainingArguments`]): As the user gave them.

    Returns:
        The plan, the same on all ranks, and on rank 0 what is known of the search.

    Raises:
        `ValueError`: On all ranks, if there is no plan or nothing to plan for.
    """
    searched: list[AutoSearch] = []

    def find() -> FoundPlan:
        found, search = _found(trainer, prepared, plugin, args)
        searched.append(search)
        return found

    found = trainer.world.from_first_rank(find)
    return found, searched[0] if searched else None


def _found(
    trainer: MultimodalParallelTrainer,
    prepared: PreparedModel,
    plugin: MultimodalParallelPlugin,
    args: MultimodalTrainingArguments,
) -> tuple[FoundPlan, AutoSearch]:
    """The plan of the checkpoint that is resumed, or of a search."""
    batch = resolve_batch(args, args.world_size)
    saved, origin = saved_plan(prepared, plugin, args)
    if saved is not None:
        dp_size = saved.modules[LANGUAGE_MODEL].dp_size
        size = -(-batch // (dp_size * saved.num_microbatches))
        saved = replace(saved, num_microbatches=num_microbatches(batch, size, dp_size))
        return FoundPlan(saved, batch, size, saved.microbatch_assignment), AutoSearch(None, origin)
    answer = _searched(trainer, prepared, plugin, args, batch)
    return FoundPlan(answer.plan, batch, answer.microbatch_size, answer.method), AutoSearch(answer, origin)


def saved_plan(
    prepared: PreparedModel, plugin: MultimodalParallelPlugin, args: MultimodalTrainingArguments
) -> tuple[ParallelPlan | None, str]:
    """
    The plan of the checkpoint that `resume_from_checkpoint` names.

    Args:
        prepared ([`PreparedModel`]): The model.
        plugin (`MultimodalParallelPlugin`): The sizes that are set.
        args ([`MultimodalTrainingArguments`]): The arguments.

    Returns:
        The plan, if there is one for as many ranks with these sizes, and a sentence about it.
    """
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
    """Raises `ValueError` if a plan has other sizes than those that are set."""
    for name, sizes in plugin.fixed_sizes.items():
        module = plan.modules[name]
        own = {"pp_size": len(module.replicas[0])}
        for key, size in sizes.items():
            has = own.get(key) or getattr(module, key)
            if has != size:
                raise ValueError(f"`{key}={size}` is set for `{name}`, and it has {has}.")


def _searched(
    trainer: MultimodalParallelTrainer,
    prepared: PreparedModel,
    plugin: MultimodalParallelPlugin,
    args: MultimodalTrainingArguments,
    batch: int,
) -> Answer:
    """The answer of a search with the training samples."""
    costs = prepared.costs
    with seeded(args.seed):  # only this rank reads samples here
        samples = training_samples(trainer, batch)
    memory_bytes = allowed_bytes(args, costs.device)
    checkpointing = _checkpointing(prepared, plugin, args)
    assert samples.measured is not None
    problem = PlanningProblem(
        costs,
        samples.measured,
        args.world_size,
        batch,
        memory_bytes=memory_bytes,
        schedule=plugin.schedule,
        method=args.microbatch_assignment,
        fixed=possible_sizes(prepared.model, prepared.spec, plugin),
        checkpointing=checkpointing,
        seed=args.seed,
    )
    result = search_plans(problem)
    best = result.best
    settings = Settings(
        gpus=args.world_size,
        gpu_type=costs.device.name,
        described=costs.device,
        global_batch_size=batch,
        schedule=plugin.schedule,
        microbatch_assignment=args.microbatch_assignment,
        memory_limit_gib=None if memory_bytes is None else memory_bytes / GIB,
        dtype=costs.device.dtype,
        plugin=plugin,
        sizes=problem.fixed,
        checkpointing=checkpointing,
    )
    name = getattr(prepared.model.config, "name_or_path", "") or type(prepared.model).__name__
    inputs = Inputs(ModelSource(name, prepared.model, prepared.spec, {}), samples, args.layer_profile, args.seed)
    size = best.microbatch_size
    method = best.candidate.method
    return Answer(settings, inputs, costs, best.typical, best.predictions, batch, size, method, result)


def _checkpointing(
    prepared: PreparedModel, plugin: MultimodalParallelPlugin, args: MultimodalTrainingArguments
) -> dict[str, bool]:
    """Module -> whether activations are recomputed, where that is set."""
    if args.activation_checkpointing:
        return dict.fromkeys(prepared.spec.modules, True)
    key = "activation_checkpointing"
    return {
        name: module.activation_checkpointing
        for name, module in plugin.modules.items()
        if module.activation_checkpointing or key in module.named
    }


def training_samples(trainer: MultimodalParallelTrainer, batch: int) -> Samples:
    """
    Sizes of samples from all over the training set, or of the first of a stream.

    Args:
        trainer ([`MultimodalParallelTrainer`]): The Trainer.
        batch (`int`): Samples of a global batch.

    Raises:
        `ValueError`: Without training samples, and where none of them tells its size.
    """
    dataset = trainer.train_dataset
    if dataset is None:
        raise ValueError(
            '`parallel="auto"` plans for the training samples, and there is no `train_dataset`. Pass one, or give a '
            "layout, such as that of `hf-mmparallel plan`."
        )
    window = StreamWindow(dataset, trainer.args.seed) if is_stream(dataset) else None
    source = trainer.training_sizes.of_rank(dataset if window is None else window)
    count = max(batch, _NUM_SAMPLES if window is None else _NUM_STREAMED)
    draw = representative_draw(trainer, source, window, count)
    if source is not None and draw.samples:
        sizes = source(draw.samples)
        if sizes.known and (sizes.tokens[LANGUAGE_MODEL] > 1).any():
            which = "training samples" if window is None else "samples of the stream, the first"
            return Samples(f"{len(draw.samples):,} {which}, by {size_origin(trainer)}", sizes)
    tokens = mean_tokens(trainer, window)
    if tokens is None:
        raise ValueError(
            'Nothing says the sizes of the training samples, which `parallel="auto"` plans for. Give `token_columns`, '
            "or `sample_tokens` to the Trainer."
        )
    return Samples("the mean of the first training samples, in place of each", SampleSizes.uniform(tokens, batch))


def report_search(search: AutoSearch, folder: Path) -> None:
    """
    Prints what was searched and found, what bounds it and what comes next, and writes the plan as `plan.yaml`, which
    `parallel=` takes, and as `plan.html`.

    Args:
        search ([`AutoSearch`]): The search.
        folder (`Path`): The output folder.
    """
    console = stderr_console()
    if search.origin:
        console.print(search.origin, highlight=False)
    answer, result = search.answer, search.result
    if answer is None or result is None:
        return
    lines = dict([*origins(answer), *summary(answer)])
    kept = ("Search", "Samples", "Costs", "Predicted step", "Throughput", "Memory", "Allocator", "Bound")
    print_labelled(console, [(label, lines[label]) for label in kept if label in lines])
    print_runners_up(console, result, explain=True)
    with not_worth_a_run("The plan"):
        folder.mkdir(parents=True, exist_ok=True)
        save_plan(str(folder / PLAN_FILE), answer, sys.argv)
        write_page(folder / PAGE, page_of(answer, sys.argv))
        console.print(f"Plan written to {folder / PLAN_FILE}, and as a page to {folder / PAGE}", highlight=False)
