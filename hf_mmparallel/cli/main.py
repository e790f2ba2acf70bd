"""Entry point of `hf-mmparallel`. Only the command that runs imports torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

PLAN_EXAMPLES = """\
examples:
  hf-mmparallel plan --model ./my-vlm --module vision:dp=2,freeze=tower --module language_model:pp=2,tp=2 \\
      --global-batch-size 64 --microbatch-size 2 --gpu-type h100 --schedule --output plan.yaml
  hf-mmparallel plan --model ./my-vlm/config.json --parallel plan.yaml --gpus 6 --dry-run

settings of `--module` (any field of `ModulePlugin`, the short names are the same as `dp_size` and so on):
  dp, pp, tp          copies, pipeline stages, ranks that share each matrix
  cp                  ranks that share the tokens of a microbatch (language_model only)
  freeze              true, tower, or a regular expression over parameter names
  layers              layers of each stage, such as 10/12/12
  colocate            another module whose ranks this one shares
  checkpointing       true to recompute activations in the backward
"""
SIMULATE_EXAMPLES = """\
examples:
  hf-mmparallel simulate plan.yaml --picture schedule.png
  hf-mmparallel simulate plan.yaml --model ./my-vlm --gpu-type a100 --global-batch-size 64
Without --model a forward counts 1 ms and a backward 2 ms on every stage.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="hf-mmparallel",
        description="Plans of multimodal models whose modules have their own parallel layouts. Needs no GPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,simulate,env}")
    form = argparse.RawDescriptionHelpFormatter
    plan = commands.add_parser(
        "plan",
        help="lay out a model, predict time and memory of a step",
        description="Reads a model's configuration (never its weights), lays its modules out and predicts one step.",
        epilog=PLAN_EXAMPLES,
        formatter_class=form,
    )
    plan.add_argument("--model", required=True, metavar="PATH|ID", help="model folder, config.json, or id on the Hub")
    layout = plan.add_mutually_exclusive_group()
    layout.add_argument("--parallel", metavar="FILE", help="YAML or JSON file: settings of modules, or a saved plan")
    layout.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="layout of one module; repeat for others; modules left out are on one rank",
    )
    plan.add_argument("--gpus", type=_positive, metavar="N", help="ranks there are; an error if the plan takes others")
    _add_step_arguments(plan)
    plan.add_argument("--schedule", action="store_true", help="draw the schedule as text")
    plan.add_argument("--output", metavar="FILE", help="write the plan as YAML, or JSON by its ending")
    plan.add_argument(
        "--dry-run",
        action="store_true",
        help="fail unless the plan fits the device's memory and its program passes the checks; say what was checked",
    )
    simulate = commands.add_parser(
        "simulate",
        help="replay one step of a saved plan",
        description="Builds the program of a saved plan, checks it for deadlocks and replays it.",
        epilog=SIMULATE_EXAMPLES,
        formatter_class=form,
    )
    simulate.add_argument("plan", metavar="PLAN", help="a plan that `hf-mmparallel plan --output` wrote")
    simulate.add_argument("--model", metavar="PATH|ID", help="the model, for times and memory of its sizes")
    _add_step_arguments(simulate)
    commands.add_parser(
        "env", help="versions and devices, for bug reports", description="Prints versions and devices."
    )
    return parser


def _add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """What a step looks like and where its pictures go."""
    parser.add_argument("--global-batch-size", type=_positive, metavar="N", help="samples of an optimizer step")
    parser.add_argument(
        "--microbatch-size",
        type=_positive,
        default=1,
        metavar="N",
        help="samples of a microbatch of one language-model replica (default: 1)",
    )
    parser.add_argument(
        "--seq-len", type=_positive, default=2048, metavar="N", help="tokens of a sample in the language model (2048)"
    )
    parser.add_argument(
        "--image-tokens", type=_positive, default=576, metavar="N", help="tokens of a sample in each encoder (576)"
    )
    parser.add_argument(
        "--gpu-type", default="h100", metavar="NAME", help="h100, h200, a100, a40 or cpu: speed and memory (h100)"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the schedule as a PNG")
    parser.add_argument("--trace", metavar="FILE", help="write the schedule for chrome://tracing and Perfetto")


def _positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` must be a whole number of at least 1.")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs a command.

    Args:
        argv (`Sequence[str]`, *optional*): Its arguments; those of the process when left out.

    Returns:
        `int`: 0, or 2 after an error, which is one line on the standard error stream.
    """
    args = build_parser().parse_args(argv)
    try:
        if args.command == "env":
            from .env import print_environment

            print_environment()
        else:
            from . import plan

            (plan.run_plan if args.command == "plan" else plan.run_simulate)(args)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
