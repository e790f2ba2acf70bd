"""Which events make which generation, and when the job ends; no process is started."""

from __future__ import annotations

from typing import Any

import pytest

from hf_mmparallel.launch.coordinator import Coordinator, join_sentence, loss_sentence
from hf_mmparallel.world.generations import Generation, Loss, Member


def _started(num_nodes: int = 2, per_node: int = 2, registered: bool = True) -> Coordinator:
    coordinator = Coordinator(num_nodes)
    for node in range(num_nodes):
        assert coordinator.generation is None
        ids = [node * per_node + worker for worker in range(per_node)]
        coordinator.take([{"kind": "node", "node": node, "ids": ids}])
        if registered:
            coordinator.take([{"kind": "registered", "id": id, "node": node} for id in ids])
    return coordinator


def _ended(id: int, exit_code: int = -9, node: int | None = None) -> dict[str, Any]:
    node = id // 2 if node is None else node
    return {"kind": "ended", "id": id, "node": node, "exit_code": exit_code, "reason": "killed", "time": 1.0}


def _left(id: int, generation: int) -> dict[str, Any]:
    return {"kind": "left", "id": id, "node": id // 2, "generation": generation, "time": 1.0}


def test_the_first_generation_has_all_processes():
    first = _started().generation
    assert first is not None
    assert first == Generation(0, (Member(0, 0), Member(1, 0), Member(2, 1), Member(3, 1)))
    assert Generation.from_json(first.to_json()) == first


def test_losses_at_the_same_time_make_one_generation():
    generation = _started().take([_ended(1), _ended(2)])
    assert generation is not None
    assert generation.number == 1 and generation.ids == (0, 3)
    assert [loss.member.id for loss in generation.losses] == [1, 2]
    assert generation.rank_of(3) == 1
    assert Generation.from_json(generation.to_json()) == generation
    assert "process 1 of node 0 (killed), process 2 of node 1 (killed)" in loss_sentence(generation)


def test_a_silent_host_loses_all_its_processes():
    silent = {"kind": "silent", "node": 1, "reason": "silent", "time": 2.0}
    generation = _started().take([silent])
    assert generation is not None and generation.ids == (0, 1)
    assert generation.losses == tuple(Loss(Member(id, 1), "silent", 2.0) for id in (2, 3))


def test_a_reported_error_is_one_loss():
    coordinator = _started()
    reported = {"kind": "reported", "id": 2, "node": 1, "reason": "raised ValueError: x", "time": 1.0}
    generation = coordinator.take([reported])
    assert generation is not None and generation.losses[0].reason == "raised ValueError: x"
    assert coordinator.take([_ended(2, 1)]) is None


def test_a_registered_process_that_ends_early_is_lost_whatever_its_exit_code():
    generation = _started().take([_ended(0, 0)])
    assert generation is not None and generation.ids == (1, 2, 3)


@pytest.mark.parametrize("event", [_ended(2), {"kind": "silent", "node": 1, "reason": "silent", "time": 2.0}])
def test_the_death_of_a_process_that_has_not_registered_ends_the_job(event):
    coordinator = _started(registered=False)
    assert coordinator.take([event]) is None
    assert coordinator.end is not None and "Process 2 of node 1" in coordinator.end.reason


def _registered(*ids: int, node: int) -> list[dict[str, Any]]:
    return [{"kind": "registered", "id": id, "node": node} for id in ids]


def test_processes_join_when_they_are_let_in():
    coordinator = _started()
    assert coordinator.take([{"kind": "node", "node": 2, "ids": [4, 5, 6]}]) is None
    assert coordinator.starting == [Member(4, 2), Member(5, 2), Member(6, 2)]
    coordinator.take(_registered(4, 5, node=2))
    assert coordinator.waiting == [Member(4, 2), Member(5, 2)]
    assert coordinator.joinable == [], "process 6 of the same launcher is not ready"
    assert coordinator.take([_ended(6, node=2)]) is None, "it was no member"
    assert coordinator.take([_ended(4, node=2)]) is None
    assert coordinator.joinable == [Member(5, 2)]
    generation = coordinator.take([_ended(1), {"kind": "accept", "id": 0}])
    assert generation is not None and coordinator.waiting == []
    assert generation.ids == (0, 2, 3, 5) and generation.joined == (Member(5, 2),)
    assert [loss.member.id for loss in generation.losses] == [1]
    assert "process 5 of node 2 joined" in join_sentence(generation)
    again = coordinator.take([_ended(5, node=2)])
    assert again is not None and again.ids == (0, 2, 3), "it is a member like the others"


def test_a_process_that_leaves_is_lost_if_others_wait_for_it():
    coordinator = _started()
    coordinator.take([_ended(3)])
    waiting = coordinator.take([_ended(1)])
    assert waiting is not None and waiting.ids == (0, 2)
    generation = coordinator.take([_left(2, generation=1)])
    assert generation is not None and generation.ids == (0,)
    assert [loss.member.id for loss in generation.losses] == [2]
    assert coordinator.take([_ended(2, 1)]) is None


def test_a_process_that_leaves_is_no_loss():
    coordinator = _started()
    assert coordinator.take([_ended(3)]) is not None
    assert coordinator.take([_left(2, generation=1), _ended(2, 1)]) is None
    generation = coordinator.take([_ended(1)])
    assert generation is not None and generation.ids == (0,)
    assert [loss.member.id for loss in generation.losses] == [1]
    assert coordinator.end is None


def test_the_end_says_why_the_last_process_was_lost():
    coordinator = _started(1)
    coordinator.take([_ended(0, node=0)])
    coordinator.take([{"kind": "reported", "id": 1, "node": 0, "reason": "ValueError: x", "time": 2.0}])
    end = coordinator.end
    assert end is not None and not end.success and end.all_are_ending
    assert end.reason.endswith("ValueError: x")


def test_members_that_let_others_in_get_an_answer_even_if_nobody_is_left_to_join():
    coordinator = _started()
    generation = coordinator.take([{"kind": "accept", "id": 0}])
    assert generation is not None and generation.number == 1
    assert generation.ids == (0, 1, 2, 3) and not generation.joined and not generation.losses


def _node(number: int, *ids: int) -> dict[str, Any]:
    return {"kind": "node", "node": number, "ids": list(ids)}


def _finished(id: int) -> dict[str, Any]:
    return {"kind": "finished", "id": id, "node": id // 2}


ALL_FINISH = [event for id in range(4) for event in (_finished(id), _ended(id, 0))]


@pytest.mark.parametrize(
    ("events", "success", "reason"),
    [
        ([_ended(0), *ALL_FINISH[2:]], True, ""),
        ([_node(2, 4, 5), *_registered(4, node=2), *ALL_FINISH], True, ""),  # although others wait
        ([_finished(1), _ended(1, 1)], False, ""),
        ([_finished(0), _ended(3)], False, "Process 3 of node 1: killed"),  # the others would wait for process 0
        ([_node(2, 4), _ended(4, 0, node=2), *map(_ended, range(4))], False, ""),  # it ended before it waited
    ],
)
def test_the_end_of_the_job(events: list[dict[str, Any]], success: bool, reason: str):
    coordinator = _started()
    for event in events:
        assert coordinator.end is None
        coordinator.take([event])
    assert coordinator.end is not None and coordinator.end.success == success and reason in coordinator.end.reason
