"""How a launcher finds a running job, and its place in it."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from hf_mmparallel.world import Membership, running_job
from hf_mmparallel.world import generations as keys
from hf_mmparallel.world.membership import FinishedRunError
from hf_mmparallel.world.running_job import parse_address, publish_job, start_together, take_place
from hf_mmparallel.world.supervisor import Limits, Supervisor, how_to_join


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def _publish(store: TCPStore, num_nodes: int, num_members: int) -> tuple[str, int]:
    address = ("127.0.0.1", store.port)
    publish_job(keys.connect(address, "job/0"), "job/0", num_nodes, num_members)
    return address


def test_addresses():
    assert parse_address("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert parse_address("[fe80::1]:29500") == ("fe80::1", 29500)


@pytest.mark.parametrize("text", ["", "29500", "host", "host:", "host:port", ":29500"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


def test_launchers_that_join_get_numbers_that_nobody_has(store):
    address = _publish(store, num_nodes=2, num_members=4)
    first, second = take_place(address, 2), take_place(address, 4)
    assert (first.node, second.node, first.prefix) == (2, 3, "job/0")
    taken = [*range(4), *range(first.first_id, first.first_id + 2), *range(second.first_id, second.first_id + 4)]
    assert len(set(taken)) == len(taken)
    assert first.first_id % 2 == 0 and second.first_id % 4 == 0, "members of a node are told by their numbers"
    places = {"first_id": first.first_id, "num_processes": 4, "processes_per_node": 2}
    assert first.settings() == {"host": "127.0.0.1", "port": store.port, **places}


def test_only_whole_nodes_join_a_job_of_several_hosts(store):
    with pytest.raises(ValueError, match="4 processes .* 2"):
        take_place(_publish(store, num_nodes=2, num_members=8), 2)


def test_any_number_of_processes_joins_a_job_of_one_host(store):
    address = _publish(store, num_nodes=1, num_members=4)
    assert take_place(address, 1).first_id >= 4
    assert take_place(address, 3).first_id % 3 == 0


def test_an_address_without_a_job_is_named(store, monkeypatch):
    monkeypatch.setattr(running_job, "_REACH_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(ValueError, match=f"127.0.0.1:{store.port}"):
        take_place(("127.0.0.1", store.port), 1)


def test_how_to_join_says_so_when_the_address_is_of_this_host_only():
    assert "`--join 10.0.0.1:29500`" in how_to_join(("10.0.0.1", 29500))
    assert "from other hosts" in how_to_join(("127.0.0.1", 29500))


def test_data_of_any_size_goes_through_the_store(store, monkeypatch):
    monkeypatch.setattr(keys, "_PIECE_BYTES", 5)
    for data in (b"", b"12345", b"123456789012"):
        keys.put(store, "data", data)
        assert keys.take(store, "data") == data


def test_process_groups_of_an_earlier_start_are_forgotten_when_no_process_of_it_runs_on_any_host(store):
    place = _publish(store, 2, 2), "hf_mmparallel/world/none/1", 2
    ours = keys.connect(*place[:2])
    ours.set("generation/0", "{}")
    store.set("none/torchelastic/role_info/0", "of the agents")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(start_together, *place)
        while not ours.check([keys.NUM_READY]):
            time.sleep(0.01)
        store.set("default_pg/0//cpu//0/0", "an address, by a process of the second launcher that still runs")
        assert not first.done()
        start_together(*place)
        first.result()
    assert not store.check(["default_pg/0//cpu//0/0"]) and ours.check(["generation/0"])
    assert store.check(["none/torchelastic/role_info/0", keys.JOB])


def test_a_launcher_that_does_not_come_to_a_new_start_is_not_waited_for(store, monkeypatch):
    monkeypatch.setattr(running_job, "_MEETING_S", 0.1)
    with pytest.raises(TimeoutError, match="1 of 2"):
        start_together(_publish(store, 2, 2), "hf_mmparallel/world/none/1", 2)


@pytest.fixture
def members(store, tmp_path):
    """Three members of a job, whose processes only wait."""
    supervisor = Supervisor(("127.0.0.1", store.port), "job/0", 0, 1, Limits())
    processes = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(3)]
    supervisor.start({rank: (rank, process) for rank, process in enumerate(processes)})
    place = {"node": 0, "host": "127.0.0.1", "port": store.port, "prefix": "job/0", "folder": str(tmp_path)}
    found = [Membership({"id": id, **place}) for id in range(3)]
    for member in found:
        member.start(lambda: None)
        member.register()
    yield found
    for process in processes:
        process.kill()
    supervisor.stop()


@pytest.mark.distributed
def test_nobody_waits_to_meet_a_process_that_has_finished(members):
    first, second, third = members
    third.report("it failed")
    left = first.next_generation(30.0)
    assert left.ids == (0, 1)
    with ThreadPoolExecutor() as pool:
        meeting = pool.submit(first.meet, left)
        with first._news:  # the news that it has finished arrive after the end of the meeting
            second.finish()  # it had the last result before it heard of the loss
            assert not meeting.result()
    with pytest.raises(FinishedRunError):
        first.next_generation(30.0)
    first.finish()
