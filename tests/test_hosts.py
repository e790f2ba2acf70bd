"""Two hosts: separate networks, time limits, no traces; `trainer/test_hosts_parity.py` has a launch over both."""

import subprocess
import sys
import time

import pytest

from tests.hosts import TwoHosts, available

_REASON = available()
pytestmark = [pytest.mark.distributed, pytest.mark.skipif(_REASON is not None, reason=_REASON or "")]

_LISTEN = "import socket; s = socket.create_server(('127.0.0.1', 4321)); s.settimeout(3); s.accept()"
_CONNECT = """
import socket, sys, time
for _ in range(10):
    try:
        socket.create_connection((sys.argv[1], 4321), timeout=0.2)
        print("reached")
        break
    except OSError as error:
        print(error)
        time.sleep(0.1)
"""


PYTHON = [sys.executable, "-c"]


@pytest.mark.deep
def test_the_hosts_see_each_other_until_the_cable_is_cut_and_have_a_loopback_each():
    with TwoHosts() as hosts:
        assert hosts.addresses[0] != hosts.addresses[1]
        listen = _LISTEN.replace("127.0.0.1", hosts.addresses[0])
        over_cable = hosts.run([[*PYTHON, listen], [*PYTHON, _CONNECT, hosts.addresses[0]]], timeout=20)
        assert "reached" in over_cable[1].output
        over_loopback = hosts.run([[*PYTHON, _LISTEN], [*PYTHON, _CONNECT, "127.0.0.1"]], timeout=20)
        assert "reached" not in over_loopback[1].output
        assert "refused" in over_loopback[1].output
        hosts.cut()
        cut = hosts.run([[*PYTHON, listen], [*PYTHON, _CONNECT, hosts.addresses[0]]], timeout=20)
        assert "reached" not in cut[1].output


@pytest.mark.deep
def test_what_runs_too_long_is_killed_with_its_children():
    with TwoHosts() as hosts:
        start = time.monotonic()
        shell = ["bash", "-c", "echo begun; sleep 987 & sleep 987"]
        done = hosts.run([shell, ["true"]], timeout=1)
        assert time.monotonic() - start < 10
        assert (done[0].returncode, done[0].output) == (-9, "begun\n")
        assert done[1].returncode == 0
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 987" not in running


def test_nothing_stays_behind_when_the_body_raises():
    def names() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    with pytest.raises(KeyError), TwoHosts() as hosts:
        assert hosts.names[0] in names()
        raise KeyError
    assert hosts.names[0] not in names()
