"""How often to save a checkpoint (Young, 1974; Daly, 2006: "A higher order estimate of the optimum interval")."""

from __future__ import annotations

import math

from .._portable import exp, expm1


def best_save_interval_s(save_s: float, mean_time_between_failures_s: float, write_s: float = 0.0) -> float:
    """
    The time from the end of a save to the start of the next with the shortest expected run, in seconds (Daly's
    higher-order form, equation 37, for failures that are independent of each other).

    Saving more often costs more time than it saves on average at a failure, when the steps since the last checkpoint
    run again.

    Args:
        save_s (`float`): Time that training waits for a save.
        mean_time_between_failures_s (`float`): Of the whole job.
        write_s (`float`, *optional*, defaults to 0.0):
            Time until a save that goes on beside the training is done. There is no other save before.

    Raises:
        `ValueError`: For a negative duration, or no time between failures.
    """
    if save_s < 0 or write_s < 0 or mean_time_between_failures_s <= 0:
        raise ValueError(
            f"`save_s={save_s}` and `write_s={write_s}` must be at least 0, and "
            f"`mean_time_between_failures_s={mean_time_between_failures_s}` above 0."
        )
    share = save_s / (2 * mean_time_between_failures_s)
    if share >= 1:  # a failure comes before the save is over, on average
        return max(mean_time_between_failures_s, write_s)
    # Young's interval, the first term of Daly's form
    young = math.sqrt(2 * save_s * mean_time_between_failures_s)
    return max(young * (1 + math.sqrt(share) / 3 + share / 9) - save_s, write_s)


def expected_slowdown(
    interval_s: float, save_s: float, mean_time_between_failures_s: float, restart_s: float = 0.0
) -> float:
    """
    Expected duration of a run with failures, in units of its duration without failures and saves (Daly, 2006).

    Args:
        interval_s (`float`): Time of training between two saves.
        save_s (`float`): Time that training waits for a save.
        mean_time_between_failures_s (`float`): Of the whole job; times between failures are exponential.
        restart_s (`float`, *optional*, defaults to 0.0): Time from a failure until training goes on.
    """
    mean = mean_time_between_failures_s
    return mean * exp(restart_s / mean) * expm1((interval_s + save_s) / mean) / interval_s
