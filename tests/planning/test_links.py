"""Links inside a node and between nodes, as messages and sums over ranks take them."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.cost import Hardware, find_device
from hf_mmparallel.planning import links
from hf_mmparallel.planning.links import link_constants, measure_links
from hf_mmparallel.world import World
from tests.deep_cases import deep
from tests.distributed import run_distributed

SLOW_S = 2e-2  # what whatever leaves a host waits
PER_BYTE_S = 5e-8


def pretend_hosts(hosts: list[str]) -> None:
    """Ranks believe to be on these hosts."""
    links.socket = SimpleNamespace(gethostname=lambda: hosts[dist.get_rank()])  # type: ignore[assignment]


def slow_between(hosts: list[str]) -> None:
    """Ranks believe to be on these hosts, between which messages and sums take time that they do not take here."""
    pretend_hosts(hosts)
    plain_sum, plain_messages = dist.all_reduce, dist.batch_isend_irecv

    def wait(peers: set[str], tensor: torch.Tensor, steps: int) -> None:
        if len(peers) > 1:
            time.sleep(steps * SLOW_S + PER_BYTE_S * tensor.numel() * tensor.element_size())

    def summed(tensor, *args, group=None, **kwargs):
        ranks = dist.get_process_group_ranks(group) if group is not None else range(len(hosts))
        wait({hosts[rank] for rank in ranks}, tensor, 2 * (len(hosts) - 1).bit_length())
        return plain_sum(tensor, *args, group=group, **kwargs)

    def exchanged(operations):
        wait({hosts[own.peer] for own in operations} | {hosts[dist.get_rank()]}, operations[0].tensor, 1)
        return plain_messages(operations)

    dist.all_reduce, dist.batch_isend_irecv = summed, exchanged  # type: ignore[assignment]


def _measured(hosts: list[str], slow: bool = False) -> dict[str, float]:
    (slow_between if slow else pretend_hosts)(hosts)
    links._LARGE_RUNS, links._MESSAGES_PER_ROUND, links._BYTES["cpu"] = 2, 1, 2**20
    return link_constants(World())


def _as_told(hosts: list[str]) -> Hardware:
    pretend_hosts(hosts)
    rates = {2: 8.0, 4: 3.0}  # ranks of a sum -> GB/s
    links._sums = lambda device, group, count: (rates[count] + 0.1 * dist.get_rank(), 10.0 * count)
    links._messages = lambda device, ring: (5.0, 7.0 + dist.get_rank())
    return measure_links(find_device("h100"), World())


def _of_four() -> tuple[dict[str, float], Hardware]:
    return _measured(["a", "b", "a", "b"], slow=True), _as_told(["a", "a", "b", "b"])


@pytest.mark.distributed
def test_links_in_a_node_are_told_apart_from_those_between_nodes_and_are_of_the_slowest_ranks():
    (found, device), *others = run_distributed(_of_four, 4)
    assert all(own == (found, device) for own in others)
    assert found["node_size"] == found["network_cards"] == 2
    assert found["node_link_latency_us"] >= 1e6 * SLOW_S > found["link_latency_us"]
    assert found["node_collective_latency_us"] >= 1e6 * SLOW_S > found["collective_latency_us"]
    # 2 x 3/4 of the bytes in the time of all of them, shared by the two ranks of a node
    assert found["node_link_gb_per_s"] < 1.5 / PER_BYTE_S / 1e9 / 2 < found["link_gb_per_s"]
    assert found["node_message_gb_per_s"] < 1 / PER_BYTE_S / 1e9 < found["message_gb_per_s"]
    assert device.node_size == 2 and device.link_gb_per_s == 8.0
    assert device.link_bytes_per_ms(range(4)) == pytest.approx(3.0e6)  # the slowest rank's
    assert device.network_gb_per_s == pytest.approx(1.5)
    assert device.message_bytes_per_ms([1, 2]) == device.message_bytes_per_ms([0, 1]) == 5e6
    assert device.latency_us([0, 1]) == device.latency_us([1, 2]) == 10.0
    assert (device.step_latency_us([0, 1]), device.step_latency_us(range(4))) == (20.0, 40.0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (["a", "a"], {*links._NODE_FIELDS}),
        (["a", "b"], {*links._NETWORK_FIELDS, "node_size", "network_cards"}),
        deep(["a", "a", "b"], {*links._NODE_FIELDS, *links._NETWORK_FIELDS, "node_size", "network_cards"}),
    ],
)
def test_what_nodes_have_not_is_not_measured(hosts, names):
    found, *others = run_distributed(_measured, len(hosts), hosts)
    assert all(own == found for own in others)
    assert found.keys() == names and all(0 < value < 1e6 for value in found.values())
    assert found.get("node_size", 1) == 1


def test_on_one_rank_nothing_is_measured():
    h100 = find_device("h100")
    assert link_constants(World()) == {} and measure_links(h100, World()) is h100
