"""Entry point of `hf-mmparallel`. Only the command that runs imports torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..plan.methods import SCHEDULES
from ..planning.argument_types import above_zero, not_negative, positive
from .calibrate_command import add_calibrate_parser
from .launch_command import add_launch_parser, run_launch
from .profile_command import add_profile_parser

# The arguments of the commands. Nothing heavy is imported before a command runs, for a fast `--help`.

PLAN_EXAMPLES = """\
examples:
  hf-mmparallel plan --model ./my-vlm --dataset chartqa --gpus 64 --gpu-type h100 --output plan.yaml --html plan.html
  hf-mmparallel plan --model ./my-vlm --dataset ./train.parquet --gpus 64 --freeze vision=tower --explain --compare
  hf-mmparallel plan --model ./my-vlm --gpus 64 --what-if frozen=vision,gpus=128 --what-if gpu_type=h200
  hf-mmparallel plan --model ./my-vlm --module language_model:tp=4 --gpus 64
  hf-mmparallel plan --model ./my-vlm --nodes 12 --failures 2
  hf-mmparallel plan --model ./my-vlm --module vision:dp=2,freeze=tower --module language_model:pp=2,tp=2 \\
      --global-batch-size 64 --microbatch-size 2 --dry-run

Without sizes of modules, or with some of them and --gpus, the best plan is searched for; given sizes are kept.

settings of `--module` (any field of `ModulePlugin`; short names stand for `dp_size` and so on):
  dp, pp, tp          data-parallel replicas, pipeline stages, tensor-parallel size
  cp                  context-parallel size: ranks that share the tokens of a row, or the images of an encoder
  ep                  ranks that share the experts of each layer
  vp                  virtual stages of each pipeline rank (interleaved 1F1B)
  split_backward      true to let gradients of weights fill the bubbles of the pipeline
  freeze              true, tower, or a regular expression over parameter names
  layers              layers of each stage, such as 10/12/12
  colocate            another module whose ranks this one shares
  checkpointing       true to recompute activations in the backward, selective to keep outputs of products for it
  cp_method, cp_mode, cp_block
                      with cp above 1: distribution of tokens (lpt, zigzag, contiguous, random), gathered keys (auto,
                      row, segments), and tokens per block (128)
  attn_implementation attention function of the module, such as sdpa, flash_attention_2 or bitfield
  zero_stage          what the copies of the module divide: 1 the optimizer's state, 2 also gradients, 3 also weights
  shard_size          with zero_stage above 0: number of copies that divide it, such as those of a node
  reshard_after_forward
                      with zero_stage 3: false for weights that stay gathered through a step
  deepspeed           a DeepSpeed JSON, whose ZeRO stage and offload the module takes; in no search
  master_weights      false to let the optimizer update 16-bit weights without a float32 copy
  offload_optimizer   true for the optimizer's state and step on the CPU
  offload_params      true for the frozen weights of layers in host memory
  offload_activations true for what layers save for the backward in host memory
  float8              recipe by which linear layers multiply in float8: tensorwise, rowwise, rowwise_with_gw_hp
  learning_rate, weight_decay
                      of the module; without effect on a plan
  peft_config         adapters of the module; a dict, so in a file for --parallel only

settings of `--what-if`, separated by commas:
  frozen, trainable   a module, as in --freeze
  gpus, gpu_type, global_batch_size, microbatch_size, seq_len, image_tokens, memory_limit_gib, schedule,
  microbatch_assignment, dtype
  packing, recomputed true or false; recomputed also selective
  fused_kernels       true for norms and activation functions of one kernel each (torch_compile, use_liger_kernel)
  peak_tflops, memory_gb_per_s, link_gb_per_s, node_link_gb_per_s
                      a figure of the device, or 2x for twice as much
"""
SIMULATE_EXAMPLES = """\
examples:
  hf-mmparallel simulate plan.yaml --picture schedule.png
  hf-mmparallel simulate plan.yaml --model ./my-vlm --dataset chartqa
  hf-mmparallel simulate plan.yaml --model ./my-vlm --dataset chartqa --gpu-type a100 --global-batch-size 64
  hf-mmparallel simulate --trace failures.csv --model ./my-vlm --node-size 8 --failures 2 --picture throughput.png
  hf-mmparallel simulate --nodes 30 --lose-every 10 --model ./my-vlm --gpu-type a40
Device, batch sizes and the drawing of samples are those that the plan was made for (`planned_for` in its file), unless
they are given. Without --model a forward takes 1 ms and a backward 2 ms on every stage.

Without a plan, a trace of failures is replayed on the model: rows of milliseconds, add or remove, and a node.
A run with `resilience` is simulated, with its own plans after each loss and join.
"""


def add_plan_parser(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="find the best plan of a model, or predict a plan with given sizes",
        description="Reads a model's configuration (never its weights), and finds the plan with the fastest step on "
        "a number of GPUs. With sizes of modules it predicts that plan.",
        epilog=PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("--model", required=True, metavar="PATH|ID", help="model folder, config.json, or id on the Hub")
    plan.add_argument("--gpus", type=positive, metavar="N", help="number of ranks, all of which a plan uses")
    layout = plan.add_argument_group("layout")
    sizes = layout.add_mutually_exclusive_group()
    sizes.add_argument("--parallel", metavar="FILE", help="YAML or JSON file: settings of modules, or a saved plan")
    sizes.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="layout of one module; repeat for others; without --gpus, omitted modules are on one rank",
    )
    _add_model_arguments(plan)
    _add_batch_arguments(plan)
    _add_data_arguments(plan)
    answers = plan.add_argument_group("answers")
    answers.add_argument(
        "--effort",
        type=positive,
        metavar="N",
        help="simulation budget in tasks per GPU (default 192); larger = slower, more thorough",
    )
    answers.add_argument(
        "--explain",
        action="store_true",
        help="all figures of the plan, each stage, where the step goes, what single changes would gain, the step as "
        "text, and why other plans were not chosen",
    )
    answers.add_argument(
        "--compare",
        action="store_true",
        help="compare with six baselines: frozen-unaware (ignores freezing), single layout for all modules, "
        "FSDP-like, DistTrain's plan, ratio-based (GPUs in proportion to FLOPs), encoders replicated",
    )
    answers.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="plan again with changed settings, and show both; repeat for more",
    )
    answers.add_argument(
        "--failures",
        type=not_negative,
        metavar="N",
        help="plan for a cluster of which N nodes may fail at once: pipeline templates, what is guaranteed, and "
        "throughput with fewer nodes; with --nodes or --gpus",
    )
    answers.add_argument(
        "--nodes", type=positive, metavar="N", help="with --failures: number of nodes, which fail as a whole"
    )
    answers.add_argument(
        "--dry-run",
        action="store_true",
        help="fail unless the plan fits the device's memory and its program passes all checks; list the checks",
    )
    _add_output_arguments(plan)
    plan.add_argument("--output", metavar="FILE", help="write the plan as YAML for the Trainer, or JSON by extension")
    plan.set_defaults(run=_run_plan)


def add_simulate_parser(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="replay one step of a saved plan, or a trace of failures",
        description="Builds the program of a saved plan, checks it for deadlocks and replays it. Without a plan: "
        "replays a trace of failures on a run that survives them.",
        epilog=SIMULATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate.add_argument("plan", metavar="PLAN", nargs="?", help="output of `hf-mmparallel plan --output`")
    simulate.add_argument("--model", metavar="PATH|ID", help="the model, for times and memory")
    simulate.add_argument("--explain", action="store_true", help="all figures of the plan, and each stage")
    _add_model_arguments(simulate)
    _add_batch_arguments(simulate)
    _add_data_arguments(simulate)
    _add_failure_arguments(simulate)
    _add_output_arguments(simulate, " (with PLAN); a trace of failures to replay, as CSV (without)")
    simulate.set_defaults(run=_run_simulate)


def add_env_parser(commands: Any) -> None:
    env = commands.add_parser(
        "env", help="versions and devices, for bug reports", description="Prints versions and devices."
    )
    env.set_defaults(run=_run_env)


def _run_plan(args: argparse.Namespace) -> None:
    from ..planning.progress import Phases

    with Phases() as phases:
        phases.begin("Starting", is_short=True)
        from .plan_command import run_plan

        run_plan(args, phases)


def _run_simulate(args: argparse.Namespace) -> None:
    if args.plan is None:
        from .simulate_command import run_replay

        run_replay(args)
        return
    from ..planning.progress import Phases

    with Phases() as phases:
        phases.begin("Starting", is_short=True)
        from .simulate_command import run_simulate

        run_simulate(args, phases)


def _run_env(args: argparse.Namespace) -> None:
    from ..planning.environment import print_environment

    print_environment()


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and device")
    device = group.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu-type",
        metavar="NAME",
        help="device of each rank: a name of the table in docs/devices.md, such as h200, a100-pcie-40gb, l40s, mi300x "
        "or cpu, or the name that the driver reports (h100, an H100 SXM)",
    )
    device.add_argument(
        "--gpu-spec",
        metavar="FILE",
        help="YAML file that describes another device, or with `like: h100` its differences; instead of --gpu-type",
    )
    group.add_argument(
        "--freeze",
        action="append",
        default=[],
        metavar="NAME[=WHAT]",
        help="module to freeze: all of it, or `vision=tower` for all but the projector; repeat for others",
    )
    group.add_argument(
        "--generator",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="module after the language model, such as image:layers=28,hidden=3072,heads=24,intermediate=12288,"
        "tokens=1024; it is planned, but no Trainer runs it",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "tf32", "float32"),
        help="compute dtype (bfloat16), tf32 for float32 with products in TF32; weights have the dtype of the "
        "configuration",
    )
    group.add_argument(
        "--profile",
        metavar="FILE",
        help="layer times from `hf-mmparallel profile`, or corrected ones from `hf-mmparallel calibrate`, instead of "
        "operation counts",
    )
    group.add_argument(
        "--memory-limit-gib", type=above_zero, metavar="GIB", help="memory limit of a rank (90 %% of the device's)"
    )


def _add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("step")
    group.add_argument(
        "--global-batch-size", type=positive, metavar="N", help="samples of an optimizer step (in a search: 4 a GPU)"
    )
    group.add_argument(
        "--microbatch-size",
        type=positive,
        metavar="N",
        help="samples of a microbatch of one language-model replica (searched, else 1)",
    )
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="order of forwards and backwards (searched, else 1f1b)",
    )
    group.add_argument(
        "--microbatch-assignment",
        metavar="NAME",
        help="arrangement of samples in microbatches: hierarchical, tapered, entrain, contiguous or a baseline, as in "
        "the Trainer (by default the one with the shortest predicted step; contiguous if all samples are equal)",
    )
    group.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        help="whether a microbatch of the language model is one row without padding (if its attention is bitfield)",
    )


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--dataset",
        metavar="PATH|ID|NAME",
        help="file or folder that `datasets` reads, id on the Hub, or published sizes of synthchartnet, chartqa, "
        "cocoqa or llava-150k; without it all samples are equal",
    )
    group.add_argument("--split", metavar="NAME", help="split of the dataset (train)")
    group.add_argument(
        "--token-columns",
        metavar="COLUMN|MODULE=COLUMN,...",
        help="columns with the tokens of a sample in the language model, or in each module: "
        "language_model=length,vision=patches; or with tokens of text and sides of images in pixels: "
        "language_model=length+vision,vision=width*height",
    )
    group.add_argument("--processor", metavar="PATH|ID", help="processor for conversations and texts (the model's)")
    group.add_argument("--image-folder", metavar="PATH", help="folder of relative paths of images, videos and audio")
    group.add_argument("--num-samples", type=positive, metavar="N", help="maximum number of measured samples (4096)")
    group.add_argument("--seed", type=not_negative, metavar="N", help="seed of the drawn samples (0)")
    group.add_argument(
        "--seq-len",
        type=positive,
        metavar="N",
        help="without a dataset: LM tokens per sample (2048)",
    )
    group.add_argument(
        "--image-tokens",
        type=positive,
        metavar="N",
        help="without a dataset: tokens per sample in each encoder (576)",
    )


def _add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("failures (without PLAN)")
    group.add_argument(
        "--failures", type=int, default=1, metavar="N", help="simultaneous failures of nodes to survive (1)"
    )
    group.add_argument("--node-size", type=positive, default=1, metavar="N", help="ranks that are lost together (1)")
    group.add_argument("--nodes", type=positive, metavar="N", help="instead of --trace: nodes at the start")
    group.add_argument(
        "--lose-every",
        type=above_zero,
        metavar="MINUTES",
        help="instead of --trace: time between two losses, until half of the nodes are left",
    )
    group.add_argument("--activation-checkpointing", action="store_true", help="recompute activations in the backward")
    for name, default, text in (
        ("--detect-seconds", 0.5, "time until all nodes know of a loss"),
        ("--regroup-seconds", 1.5, "time for a new plan and new groups in the same processes"),
        ("--start-seconds", 60.0, "time from a loss until new processes read a checkpoint"),
        ("--storage-gb-per-s", 2.0, "what all nodes together write to storage or read from it"),
    ):
        group.add_argument(name, type=above_zero, default=default, metavar="N", help=f"{text} ({default:g})")
    group.add_argument(
        "--copy-gb-per-s", type=above_zero, metavar="N", help="what a node sends or receives (by the device's links)"
    )
    group.add_argument("--save-every", type=positive, metavar="STEPS", help="between checkpoints (none)")


def _add_output_arguments(parser: argparse.ArgumentParser, trace: str = "") -> None:
    group = parser.add_argument_group("files")
    group.add_argument("--picture", metavar="FILE", help="write a chart of the schedule as PNG")
    group.add_argument("--html", metavar="FILE", help="write a self-contained HTML page of the plan")
    group.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    group.add_argument("--trace", metavar="FILE", help=f"write the schedule for chrome://tracing and Perfetto{trace}")


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
