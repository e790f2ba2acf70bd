"""What a launcher concludes from signs of life of its processes, and from connections of other launchers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from hf_mmparallel.world.membership import Standing
from hf_mmparallel.world.supervisor import Lifeline, Lifelines, Limits
from hf_mmparallel.world.watcher import Activity


def _signs(step: int = 3, longest_s: float = 0.0) -> dict[str, Any]:
    """The sign of a process whose first save has taken a time, and that does another one since 10 s."""
    activity = Activity()
    standing, now = Standing(activity), time.monotonic()
    for number in range(step + 1):
        activity.step = number
        standing.look(now)
    for number, duration_s in enumerate((longest_s, 10.0)):
        activity.now(f"saving `checkpoint-{number}`")
        standing.look(now)
        now += duration_s
        standing.look(now)
        activity.now("reading samples") if number == 0 else None
        sign = standing.look(now)
    assert (sign["standing_s"], sign["step"], sign["num_steps"]) == (10.0, step, step + 1)
    assert sign["doing"] == f"step {step}: saving `checkpoint-1`" and not sign["waits"]
    return sign


@pytest.mark.parametrize(
    ("stall_timeout", "signs", "limit_s"),
    [
        (0.0, [_signs()], math.inf),
        (5.0, [_signs()], 5.0),
        (None, [_signs(step=1)], math.inf),
        (None, [_signs(longest_s=2.0)], 900.0),
        (None, [_signs(longest_s=100.0)], 2000.0),
        (None, [_signs(), _signs(longest_s=100.0), {}], 2000.0),
    ],
    ids=["none", "a number", "in the first steps", "short ones", "long ones", "long ones of another process"],
)
def test_the_limit_of_an_activity_follows_from_the_longest_of_its_kind(stall_timeout, signs, limit_s):
    assert Limits(stall_timeout=stall_timeout).stall_limit_s(signs[0], signs) == pytest.approx(limit_s)


def _wait_until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_connection_tells_which_launcher_has_ended():
    lines = Lifelines()
    ended: set[int] = set()
    first, second = (Lifeline("127.0.0.1", lines.port, node) for node in (1, 2))
    second.close()
    _wait_until(lambda: ended.update(lines.ended()) or ended)
    assert ended == {2} and not lines.ended() and not first.has_ended
    lines.close()
    _wait_until(lambda: first.has_ended)
    none = Lifeline("127.0.0.1", 1, 3)
    assert not none.has_ended, "without a connection only silence tells"
    first.close()
