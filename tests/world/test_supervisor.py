"""What a launcher concludes from signs of life of its processes, and from connections of other launchers."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_mmparallel.world.membership import Standing
from hf_mmparallel.world.supervisor import Lifeline, Lifelines, Limits, Supervisor, Worker
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
    assert (sign["standing_s"], sign["step"], sign["num_steps"]) == (pytest.approx(10.0), step, step + 1)
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


def test_an_activity_in_which_all_wait_for_each_other_says_nothing_of_its_kind():
    activity = Activity()
    standing = Standing(activity)
    for is_void in (False, True):
        activity.now("sums", waits=True)
        now = time.monotonic() + 50.0 * activity.count
        standing.look(now)
        assert standing.look(now + 5.0 + 10.0 * is_void)["standing_s"] >= 5.0
        standing.is_void = is_void
    activity.now("reading samples")
    assert standing.look(now + 20.0)["longest_s"]["sums"] == pytest.approx(5.0)


class _Running:
    """A process that does not end by itself."""

    pid = 2**22 + 1  # above all ids of processes

    def poll(self) -> None:
        return None


def test_a_process_that_waits_too_long_says_so_and_is_lost_if_it_goes_on_waiting_after_all_have_met_anew():
    supervisor = Supervisor(("127.0.0.1", 1), "p", 0, 1, Limits(stall_timeout=5.0))
    worker = Worker(3, _Running())
    sign = {
        "step": 4,
        "num_steps": 4,
        "doing": "sums",
        "waits": True,
        "kind": "sums",
        "longest_s": {},
        "stack": "here",
    }

    def read(now: float, standing_s: float) -> list[tuple[str, int]]:
        told = {**sign, "beat": now, "standing_s": standing_s}
        Path(supervisor._folder.name, "3.json").write_text(json.dumps(told))
        supervisor._clock.now = now
        supervisor._read_sign(worker, now)
        events = [supervisor._events.get() for _ in range(supervisor._events.qsize())]
        return [(event["kind"], event["id"]) for event in events]

    assert read(10.0, 4.0) == []
    assert read(11.5, 5.5) == [("stuck", 3)] and read(12.0, 6.0) == []
    assert read(13.0, 0.5) == [("moves", 3)]
    assert read(20.0, 7.5) == [("stuck", 3)]
    assert read(100.0, 87.5) == [], "others have not met yet"
    supervisor._met_anew = 101.0
    assert read(110.0, 97.5) == []
    assert read(170.0, 157.5) == [("reported", 3)] and "157.5 s in `sums`" in worker.reason
    supervisor._folder.cleanup()


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
