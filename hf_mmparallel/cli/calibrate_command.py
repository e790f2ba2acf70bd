"""`hf-mmparallel calibrate`: corrects costs by measured runs, and reports their errors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ..cost.calibration import Calibration

EXAMPLES = """\
examples:
  hf-mmparallel calibrate out/trainer_log.jsonl --output calibrated.json
  hf-mmparallel calibrate run1/trainer_log.jsonl run2/trainer_log.jsonl --output calibrated.json
  hf-mmparallel plan --model ./my-vlm --gpus 64 --profile calibrated.json

A run under a plan writes `trainer_log.jsonl` into its output folder. Logs of other layouts of the same model on the
same kind of GPU may be combined. The Trainer reads the result as `layer_profile=calibrated.json`.
"""


def add_calibrate_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="correct costs by the logs of runs, for `--profile` of the other commands",
        description="Fits factors of the forward and backward times of each module, of their kernel launches and "
        "tensor-parallel sums, and of activation memory to measured runs. Half of the logged windows are fitted and "
        "the others used for evaluation; then all are fitted. Needs no GPU and no model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="trainer_log.jsonl of a run, or its output folder; several runs of the same model are combined",
    )
    parser.add_argument("--output", metavar="FILE", help="write the calibration as JSON")
    parser.add_argument(
        "--profile", metavar="FILE", help="the `layer_profile` of the runs, if `hf-mmparallel profile` wrote it"
    )
    parser.set_defaults(run=run_calibrate)


def run_calibrate(args: argparse.Namespace) -> None:
    from ..cost.calibration import Calibration, calibrate_logs, read_costs
    from ..planning.text import new_console

    logs = [log_file(path) for path in args.logs]
    if args.profile and not Path(args.profile).is_file():
        raise ValueError(f"`--profile {args.profile}` is not a file. Give the output of `hf-mmparallel profile`.")
    source = None if args.profile is None else read_costs(args.profile)
    calibration = calibrate_logs(logs, source.profile if isinstance(source, Calibration) else source)
    console = new_console()
    console.print(
        f"{calibration.windows} windows of {', '.join(calibration.run.modules)} on {calibration.run.device_name}",
        highlight=False,
    )
    console.print(error_table(calibration))
    console.print(scale_table(calibration))
    for line in notes(calibration):
        console.print(line, highlight=False, soft_wrap=True)
    if args.output:
        calibration.save(args.output)
        console.print(f"Calibration written to {args.output}", highlight=False, soft_wrap=True)


def log_file(path: str) -> Path:
    """Returns the log at a path, which may be the output folder of a run; raises `ValueError` if there is none."""
    from ..cost.run_log import RUN_LOG

    log = Path(path) / RUN_LOG if Path(path).is_dir() else Path(path)
    if log.is_file():
        return log
    if Path(path).is_dir():
        raise ValueError(
            f"`{path}` is a folder without a `{RUN_LOG}`. A run under a plan writes one into its output folder, a "
            "line at every `logging_steps`."
        )
    raise ValueError(f"`{path}` does not exist. Give the `{RUN_LOG}` of a run's output folder.")


def error_table(calibration: Calibration) -> Table:
    """Returns a table of prediction errors in the windows left out of the fit, before and after calibration."""
    from rich.table import Table

    judged = calibration.judged
    title = f"Errors in the last {judged} windows, by a fit of the first {calibration.windows - judged}"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("median before", "after", "worst before", "after"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, error in calibration.errors.items():
        cells = (error.before, error.after, error.worst_before, error.worst_after)
        table.add_row(name.replace("/", ", "), *(f"{cell:.1%}" for cell in cells))
    return table


def scale_table(calibration: Calibration) -> Table:
    """Returns a table of the corrections, fitted on all windows."""
    from rich.table import Table

    table = Table(title="Factors of costs, by all windows", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("of compute", "of launches", "of sums"):
        table.add_column(name, justify="right", no_wrap=True)
    for module, scales in calibration.scales.items():
        for kind, scale in scales.items():
            factors = (scale.compute, scale.launch, scale.sum)
            table.add_row(f"{module}, {kind}", *("-" if factor is None else f"{factor:.3g}" for factor in factors))
    if calibration.activations is not None:
        table.add_row("activations", f"{calibration.activations:.3g}", "-", "-")
    return table


def notes(calibration: Calibration) -> list[str]:
    """Returns limitations of the calibration, one sentence each."""
    lines = []
    if calibration.activations is None:
        lines.append("Memory is not calibrated: it was not measured, which needs CUDA.")
    scales = {
        f"`{module}` ({kind})": scale for module, kinds in calibration.scales.items() for kind, scale in kinds.items()
    }
    untold = [name for name, scale in scales.items() if scale.launch is None]
    if untold:
        lines.append(
            f"Launches of {', '.join(untold)} keep their predicted time (a factor of 1): no logged task is so small "
            "that the host takes longer to launch it than the device to compute it."
        )
    if not any(scale.sum for scale in scales.values()):
        lines.append("Tensor-parallel sums keep their predicted time: no run has any.")
    share = calibration.outside_fraction
    lines.append(
        f"With measured tasks, a step is predicted {abs(share):.1%} {'shorter' if share >= 0 else 'longer'} "
        "than it is, due to messages, gradient sums and host time between tasks, which are not corrected."
    )
    return lines
