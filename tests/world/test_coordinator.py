"""Which events make which generation, and when the job ends; no process is started."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from hf_mmparallel.world.generations import Generation, Loss, Member
from hf_mmparallel.world.launch_coordinator import Coordinator, End, anew_sentence, join_sentence, loss_sentence

Event = dict[str, Any]


def _node(number: int, *ids: int) -> Event:
    return {"kind": "node", "node": number, "ids": list(ids)}


def _registered(*ids: int, node: int) -> list[Event]:
    return [{"kind": "registered", "id": id, "node": node} for id in ids]


def _ended(id: int, exit_code: int = -9, node: int | None = None) -> Event:
    node = id // 2 if node is None else node
    return {
        "kind": "ended",
        "id": id,
        "node": node,
        "exit_code": exit_code,
        "reason": "killed",
        "time": 1.0,
        "step": 3,
    }


def _reported(id: int) -> Event:
    return {"kind": "reported", "id": id, "node": id // 2, "reason": "raised ValueError: x", "time": 2.0, "step": 5}


def _left(id: int, generation: int, reason: str = "") -> Event:
    return {"kind": "left", "id": id, "node": id // 2, "generation": generation, "reason": reason, "time": 1.0}


def _finished(id: int) -> Event:
    return {"kind": "finished", "id": id, "node": id // 2}


ALL_LOST = "All processes were lost, the last one because of: raised ValueError: x"
SILENT = {"kind": "silent", "node": 1, "reason": "silent", "time": 2.0}
ACCEPT = {"kind": "accept", "id": 0}


def _started(registered: bool = True, before: End | None = None) -> Coordinator:
    """Processes 0 to 3 on two nodes."""
    coordinator = Coordinator(2, before)
    for node in range(2):
        assert coordinator.generation is None
        ids = 2 * node, 2 * node + 1
        coordinator.take([_node(node, *ids)])
        if registered:
            coordinator.take(_registered(*ids, node=node))
    return coordinator


def test_the_first_generation_has_all_processes():
    first = _started().generation
    assert first == Generation(0, (Member(0, 0), Member(1, 0), Member(2, 1), Member(3, 1)))


# what is taken together, the members of the generation that it makes, and who was lost
GENERATIONS: dict[str, list[tuple[list[Event], tuple[int, ...] | None, tuple[int, ...]]]] = {
    "losses at the same time": [([_ended(1), _ended(2)], (0, 3), (1, 2))],
    "a silent host loses all its processes": [([SILENT], (0, 1), (2, 3))],
    "a reported error is one loss": [([_reported(2)], (0, 1, 3), (2,)), ([_ended(2, 1)], None, ())],
    "a process that ends early, whatever its exit code": [([_ended(0, 0)], (1, 2, 3), (0,))],
    "a process that leaves is lost if others wait for it": [
        ([_ended(3)], (0, 1, 2), (3,)),
        ([_ended(1)], (0, 2), (1,)),
        ([_left(2, generation=1)], (0,), (2,)),
        ([_ended(2, 1)], None, ()),
    ],
    "a process that leaves a run that needs it, and ends": [
        ([_left(2, generation=0, reason="asked to"), _left(3, generation=0, reason="asked to")], (0, 1), (2, 3)),
        ([_ended(2, 0), _ended(3, 0)], None, ()),
    ],
    "a process that leaves is no loss": [
        ([_ended(3)], (0, 1, 2), (3,)),
        ([_left(2, generation=1), _ended(2, 1)], None, ()),
        ([_ended(1)], (0,), (1,)),
    ],
    "an answer for members that let others in when nobody is left to join": [([ACCEPT], (0, 1, 2, 3), ())],
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_events_make_generations(name: str):
    coordinator, number = _started(), 0
    for events, ids, lost in GENERATIONS[name]:
        generation = coordinator.take(events)
        assert (generation and generation.ids) == ids
        if generation is not None:
            number += 1
            assert generation.number == number and not generation.joined
            assert tuple(loss.member.id for loss in generation.losses) == lost
            assert [generation.rank_of(id) for id in generation.ids] == list(range(len(generation.ids)))
            assert Generation.from_json(generation.to_json()) == generation
    assert coordinator.end is None or name == "a process that leaves is lost if others wait for it"


def test_a_loss_has_its_member_its_reason_and_its_time():
    generation = _started().take([SILENT])
    assert generation is not None
    assert generation.losses == tuple(Loss(Member(id, 1), "silent", 2.0) for id in (2, 3))
    assert "processes 2, 3 of node 1 (silent)" in loss_sentence(generation)
    generation = _started().take([_ended(1), _ended(2)])
    assert generation is not None
    assert "process 1 of node 0 (killed), process 2 of node 1 (killed)" in loss_sentence(generation)


def _stuck(*ids: int) -> list[Event]:
    return [{"kind": "stuck", "id": id, "doing": f"9 s in `sum` of {id}"} for id in ids]


def test_members_that_all_wait_for_each_other_meet_anew():
    coordinator = _started()
    assert coordinator.take(_stuck(0, 1, 2)) is None
    assert coordinator.take([{"kind": "moves", "id": 1}]) is None
    assert coordinator.take(_stuck(3)) is None
    generation = coordinator.take(_stuck(1))
    assert generation is not None and generation.ids == (0, 1, 2, 3) and not generation.losses
    assert "9 s in `sum` of 0" in generation.anew and generation.anew in anew_sentence(generation)
    assert Generation.from_json(generation.to_json()) == generation
    assert coordinator.take(_stuck(0)) is None, "they are waited for again"
    assert _started(registered=False).take(_stuck(0, 1, 2, 3)) is None, "nobody could do anything again"


def test_a_connection_that_is_lost_without_a_loss_lets_all_meet_anew_once():
    coordinator = _started()
    cut = [{"kind": "cut", "id": id, "generation": 0} for id in (1, 2)]
    generation = coordinator.take(cut[:1])
    assert generation is not None and generation.number == 1 and "process 1" in generation.anew
    assert coordinator.take(cut[1:]) is None, "it has been there before it heard of the next generation"
    generation = coordinator.take([{**cut[0], "generation": 1}, _ended(2)])
    assert generation is not None and generation.losses and not generation.anew, "a loss explains it"


@pytest.mark.parametrize("event", [_ended(2), SILENT], ids=["killed", "silent"])
def test_the_death_of_a_process_that_has_not_registered_ends_the_job(event: Event):
    coordinator = _started(registered=False)
    assert coordinator.take([event]) is None
    assert coordinator.end is not None and "Process 2 of node 1" in coordinator.end.reason


def test_processes_join_when_they_are_let_in():
    coordinator = _started()
    assert coordinator.take([_node(2, 4, 5, 6)]) is None
    assert coordinator.starting == [Member(4, 2), Member(5, 2), Member(6, 2)]
    coordinator.take(_registered(4, 5, node=2))
    assert coordinator.waiting == [Member(4, 2), Member(5, 2)]
    assert coordinator.joinable == [], "process 6 of the same launcher is not ready"
    assert coordinator.take([_ended(6, node=2)]) is None, "it was no member"
    assert coordinator.take([_ended(4, node=2)]) is None
    assert coordinator.joinable == [Member(5, 2)]
    generation = coordinator.take([_ended(1), ACCEPT])
    assert generation is not None and coordinator.waiting == []
    assert generation.ids == (0, 2, 3, 5) and generation.joined == (Member(5, 2),)
    assert [loss.member.id for loss in generation.losses] == [1]
    assert "process 5 of node 2 joined" in join_sentence(generation)
    again = coordinator.take([_ended(5, node=2)])
    assert again is not None and again.ids == (0, 2, 3), "it is a member like the others"


ALL_FINISH = [event for id in range(4) for event in (_finished(id), _ended(id, 0))]
ENDS: dict[str, tuple[list[Event], bool, str]] = {
    "a loss": ([_ended(0), *ALL_FINISH[2:]], True, ""),
    "others wait": ([_node(2, 4, 5), *_registered(4, node=2), *ALL_FINISH], True, ""),
    "finished and failed": ([_finished(1), _ended(1, 1)], False, ""),
    # the others would wait for process 0
    "killed beside a finished one": ([_finished(0), _ended(3)], False, "Process 3 of node 1: killed"),
    "ended before it waited": ([_node(2, 4), _ended(4, 0, node=2), *map(_ended, range(4))], False, ""),
    "the last process lost": ([*map(_ended, range(3)), _reported(3)], False, "ValueError: x"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_the_job(name: str):
    events, success, reason = ENDS[name]
    coordinator = _started()
    for event in events:
        assert coordinator.end is None
        coordinator.take([event])
    end = coordinator.end
    assert end is not None and end.success == success and reason in end.reason
    assert end.all_are_ending or name != "the last process lost"


ALL_DIE = [*map(_ended, range(3)), _reported(3)]
# the end before, what happens now, whether the job may be started again
RESTARTS: dict[str, tuple[End | None, list[Event], bool]] = {
    "the first end": (None, ALL_DIE, True),
    "another reason": (End(False, "another", step=5), ALL_DIE, True),
    "steps were done": (End(False, ALL_LOST, step=4), ALL_DIE, True),
    "the same end": (End(False, ALL_LOST, step=5), ALL_DIE, False),
    "a host is gone": (None, [SILENT, _ended(0), _ended(1)], False),
    "a launcher ended by a signal": (None, [{"kind": "leaving", "node": 0}, {"kind": "failed", "reason": "x"}], False),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_which_ends_are_followed_by_a_new_start(name: str):
    before, events, expected = RESTARTS[name]
    coordinator = _started(before=before)
    for event in events:
        coordinator.take([event])
    assert coordinator.end is not None and coordinator.end.may_restart == expected
    assert End(**json.loads(json.dumps(asdict(coordinator.end)))) == coordinator.end
