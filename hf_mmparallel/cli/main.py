"""Entry point of `hf-mmparallel`. Only the command that runs imports torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .calibrate_command import add_calibrate_parser
from .launch_command import add_launch_parser, run_launch
from .parsers import add_env_parser, add_plan_parser, add_simulate_parser
from .profile_command import add_profile_parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="hf-mmparallel",
        description="Plans for multimodal models with a separate parallel layout for each module. Needs no GPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_plan_parser(commands)
    add_simulate_parser(commands)
    add_profile_parser(commands)
    add_calibrate_parser(commands)
    add_launch_parser(commands)
    add_env_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs a command. Returns 0, or 2 after an error, which is one line on stderr; `launch` has exit codes of its own.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        if arguments[:1] == ["launch"]:  # accelerate parses the rest
            return run_launch(arguments[1:])
        args = build_parser().parse_args(arguments)
        args.command_line = ["hf-mmparallel", *arguments]
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
