"""`hf-mmparallel launch`: `accelerate launch` with workers that may die while others live."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

# what the launcher passes on to its processes: the signals of torchrun, and one that Slurm sends
PASSED_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
LAUNCH_HELP = "Launch a script as `accelerate launch` does; training with resilience goes on when processes die."
_ADDED = """

In addition to `accelerate launch`: processes whose training is resilient go on when others die. A process or a host
that dies, is silent or hangs is named, and the exit code is 0 if at least one process finishes. Without resilience a
process that dies ends all. A host whose launcher gets SIGTERM leaves a resilient training between two steps. The host
of the first machine, which keeps the processes together, must live. With `--restart` a job that could not go on is
started again. With `--join` the processes of this host are added to a training that runs already."""


def add_launch_parser(commands: Any) -> None:
    """Adds `launch`, whose arguments are parsed by accelerate."""
    commands.add_parser("launch", help=LAUNCH_HELP, add_help=False)


def launch_parser() -> argparse.ArgumentParser:
    """The parser of `accelerate launch` with a few more arguments."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.prog = "hf-mmparallel launch"
    parser.description = f"{parser.description}{_ADDED}"
    group = parser.add_argument_group("Resilience Arguments", "How long silence is tolerated.")
    for name, default, meaning in (
        ("host", 30.0, "without a sign of life of a host, after which its processes are lost"),
        ("hang", 60.0, "without a sign of life of a process, after which it is killed; 0 for no limit"),
    ):
        text = f"Seconds {meaning} (default {default:g})."
        group.add_argument(f"--{name}_timeout", type=float, default=default, metavar="SECONDS", help=text)
    group.add_argument(
        "--stall_timeout",
        type=_seconds_or_auto,
        default=None,
        metavar="SECONDS",
        help="Seconds in one activity, after which a process is killed that does not wait for others, and processes "
        'that all wait for each other meet anew; 0 for no limit. By default ("auto"), once two steps are done, 20 '
        "times the longest activity of its kind so far, 900 at least.",
    )
    group.add_argument(
        "--restart",
        dest="max_restarts",
        type=int,
        default=0,
        metavar="TIMES",
        help="Start a job again that could not go on, at most so many times, each from the last checkpoint that it "
        "has saved in its output folder; not after a signal, nor if a launcher is gone, nor if it ends for the same "
        "reason without having come a step further. The same as --max_restarts.",
    )
    group.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="Add the processes of this host to a training that runs at this address, which its first launcher "
        "prints. Give the same script and arguments, and as many processes as the other hosts have each.",
    )
    return parser


def _seconds_or_auto(text: str) -> float | None:
    return None if text == "auto" else float(text)


def _launch_this_host(args: argparse.Namespace) -> None:
    """Launches the processes of this host only, by torch's agent even if there is one."""
    from accelerate.commands.launch import _validate_launch_command, multi_gpu_launcher

    args, *_ = _validate_launch_command(args)
    args.num_processes = max(1, args.num_processes // (args.num_machines or 1))
    args.num_machines, args.machine_rank = 1, 0
    args.main_process_ip, args.main_process_port = None, 0
    args.max_restarts = 0
    multi_gpu_launcher(args)


def run_launch(arguments: Sequence[str]) -> int:
    """
    Runs a script by the command line after `launch`. Returns 0 if at least one process finished and none failed that
    was not lost, 128 and its number after a signal, else 1.
    """
    with mock.patch.object(sys, "argv", ["accelerate", "launch", *arguments]):  # its help reads them
        args = launch_parser().parse_args(arguments)
    args.signals_to_handle = PASSED_ON  # accelerate gives torch's agent what its parser knows
    if args.host_timeout <= 0 or args.hang_timeout < 0 or (args.stall_timeout or 0) < 0:
        raise ValueError("--host_timeout must be above 0, --hang_timeout and --stall_timeout 0 or above.")

    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..world.launch_agent import surviving_agent
    from ..world.running_job import parse_address
    from ..world.supervisor import Limits, announce

    join = None if args.join is None else parse_address(args.join)
    with surviving_agent(Limits(args.host_timeout, args.hang_timeout, args.stall_timeout), join) as outcome:
        try:
            if join is None:
                launch_command(args)
            else:
                _launch_this_host(args)
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            for reason in outcome.reasons:  # again: torch names the first process that ended, not what ended the job
                announce(reason)
            return 1
        except SignalException as error:
            if outcome.has_left:
                announce(f"Ended by {error.sigval.name} when its processes had left; the others go on.")
                return 0
            announce(f"Ended by {error.sigval.name}, which its processes got.")
            return 128 + error.sigval
    return 0
