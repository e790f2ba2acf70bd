"""How often to save, in words."""

from __future__ import annotations

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..drawing.workload_chart import number_text
from ..resilience.save_interval import best_save_interval_s, expected_slowdown


def save_advice(blocked_s: float, write_s: float, step_s: float | None, args: TrainingArguments) -> str:
    """
    Returns one line on the cost of a checkpoint and on the interval with which a run is expected to end first:
    training waits for `blocked_s`, files take `write_s` more, 0 if training waits for them, and a step `step_s`, if
    known.
    """
    hours: float = args.mean_time_between_failures_h  # type: ignore[attr-defined]
    mean_s = 3600 * hours
    interval_s = best_save_interval_s(blocked_s, mean_s, write_s)
    cost = f"training waited {number_text(blocked_s)} s"
    if write_s:
        cost += f", the files were written in the {number_text(write_s)} s after that"
    often = f"every {number_text(interval_s)} s"
    if step_s is not None:
        count = max(round(interval_s / step_s), 1)
        interval_s = max(count * step_s, interval_s)
        steps = "every step" if count == 1 else f"every {count:,} steps"
        often = f"{steps} of {number_text(step_s)} s"
    lost = expected_slowdown(interval_s, blocked_s, mean_s) - 1
    strategy = SaveStrategy(args.save_strategy)
    is_by_steps = strategy == SaveStrategy.STEPS
    setting = f"save_steps={args.save_steps:g}" if is_by_steps else f"save_strategy={strategy.value!r}"
    return (
        f"A checkpoint: {cost}. With a failure every {hours:g} h (`mean_time_between_failures_h`), a run is expected "
        f"to end first if it saves {often}, and then takes {lost:.2%} longer than without failures and saves; this "
        f"one has `{setting}`."
    )
