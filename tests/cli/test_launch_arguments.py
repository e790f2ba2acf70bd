"""`hf-mmparallel launch` takes the arguments of `accelerate launch`, and a few more."""

from __future__ import annotations

import pytest

from hf_mmparallel.cli.launch_command import launch_parser
from hf_mmparallel.cli.main import main
from hf_mmparallel.world.membership import Membership


def test_it_takes_the_arguments_of_accelerate():
    given = ["--num_processes", "4", "--hang_timeout", "3", "train.py", "--hang_timeout", "7"]
    args = launch_parser().parse_args(given)
    assert (args.num_processes, args.hang_timeout, args.host_timeout, args.stall_timeout) == (4, 3.0, 2.0, 0.0)
    assert (args.training_script, args.training_script_args) == ("train.py", ["--hang_timeout", "7"])


def test_its_help_says_what_it_adds(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    said = capsys.readouterr().out
    assert "In addition to `accelerate launch`" in said
    assert "--num_processes" in said and "--host_timeout SECONDS" in said


def test_limits_are_checked(fail):
    assert "--host_timeout must be above 0" in fail("launch", "--host_timeout", "0", "train.py")


def test_other_launchers_have_no_membership(monkeypatch):
    monkeypatch.delenv("HF_MMPARALLEL_LAUNCH", raising=False)
    assert Membership.from_environment() is None
