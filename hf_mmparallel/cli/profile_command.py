"""`hf-mmparallel profile`: times the layers of a model on this machine and writes them to a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planning.argument_types import above_zero, positive

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..cost.profile import LayerProfile, MeasuredLayer

EXAMPLES = """\
examples:
  hf-mmparallel profile --model ./my-vlm --device cuda --dtype bfloat16 --tp 1,2,4 --output h100.json
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node0:29500 --rdzv-backend c10d --no-python \\
      hf-mmparallel profile --model ./my-vlm --output h100.json
  hf-mmparallel profile --model ./my-vlm/config.json --lengths 64,256,1024 --output laptop.json
  hf-mmparallel plan --model ./my-vlm --gpus 64 --profile h100.json

One layer of each kind is created with random weights at a time, so that models too large for one GPU can be measured.
Under torchrun the links between ranks are measured as well, inside a node and between nodes: start one process per
GPU of each node. Then the first rank measures layers and writes the file, and the others exit.
A profile contains no weights and no data: share it with others who plan for the same model and the same GPUs.
"""
DTYPES = ("bfloat16", "float16", "float32")
LABELS = {"forward": "forward", "data_gradient": "data grad", "weight_gradient": "weight grad"}
WIDTH = 160


def add_profile_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="time the layers of a model on this machine, for `--profile` of the other commands",
        description="Times one layer of each kind of a model at several lengths, forward and gradients separately, "
        "and fits `a x^2 + b x + c` to each. Needs the model's configuration, not its weights.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, metavar="PATH|ID", help="model folder, config.json, or id on the Hub"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to measure (cuda if available)")
    parser.add_argument(
        "--tp", type=_numbers, default=(1,), metavar="N,...", help="tensor-parallel sizes; one device suffices (1)"
    )
    parser.add_argument("--lengths", type=_numbers, metavar="N,...", help="tokens of a chunk (64,256,1024,4096,16384)")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="skip longer chunks")
    parser.add_argument(
        "--max-seconds",
        type=above_zero,
        default=10.0,
        metavar="S",
        help="skip chunks whose forward and backward take longer (10)",
    )
    parser.add_argument("--module", action="append", metavar="NAME", help="only this module; repeat for others")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (that of the configuration)")
    parser.add_argument("--autocast", choices=DTYPES[:2], help="compute dtype of matrix products, as with `--bf16`")
    parser.add_argument("--attention", metavar="NAME", help="attention function, such as sdpa (the model's default)")
    parser.set_defaults(run=run_profile)


def run_profile(args: argparse.Namespace) -> None:
    import torch
    from rich.console import Console

    from ..planning.device_constants import measure_constants
    from ..planning.inputs import read_model
    from ..planning.layer_profile import LENGTHS, ProfileSettings, profile_layers

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device cuda`: torch finds no CUDA device. Use `--device cpu`, or run it on the GPU.")
    lengths = tuple(n for n in args.lengths or LENGTHS if n <= (args.max_tokens or n))
    if not lengths:
        raise ValueError(f"`--max-tokens {args.max_tokens}` excludes all lengths. Raise it, or give `--lengths`.")
    config = read_model(args.model, {}, []).model.config
    settings = ProfileSettings(
        tp_sizes=args.tp,
        lengths=lengths,
        modules=None if args.module is None else tuple(args.module),
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        autocast=None if args.autocast is None else getattr(torch, args.autocast),
        device=device,
        attention=args.attention,
        limit_s=args.max_seconds,
    )
    links = _links(device)
    if links is None:
        return
    with Console(stderr=True).status("Building the model") as status:
        profile = profile_layers(config, settings, report=status.update)
        status.update("Measuring the device")
        kind = getattr(torch, profile.autocast or profile.dtype)
        constants = measure_constants(torch.device(device), kind) | links
    profile = replace(profile, model=_name(args.model), constants=constants)
    profile.save(args.output)
    report(Console(width=None if Console().is_terminal else WIDTH), profile)
    print(f"Profile written to {args.output}")


def _links(device: str) -> dict[str, float] | None:
    """Measures the links between the launched ranks, and ends their group; `None` on all but the first rank."""
    from .._environment import launched_processes

    if launched_processes()[0] == 1:
        return {}
    import torch
    from accelerate import PartialState

    from ..planning.links import link_constants
    from ..world import World

    state = PartialState(cpu=device == "cpu")
    constants = link_constants(World(state.device or torch.device(device)))
    state.destroy_process_group()
    return constants if state.is_main_process else None


def report(console: Console, profile: LayerProfile) -> None:
    """Prints a table per module, then curves with large errors and skipped measurements."""
    kind = profile.dtype if profile.autocast is None else f"{profile.dtype} with {profile.autocast} autocast"
    console.print(f"{profile.model} on {profile.device}: {kind}, {profile.attention} attention", highlight=False)
    for module in dict.fromkeys(layer.module for layer in profile.layers):
        console.print(profile_table(module, profile.of_module(module)))
    if profile.constants:
        console.print(constants_text(profile.constants), highlight=False, soft_wrap=True)
    for line in (*misfits(profile), *(f"Left out: {text}." for text in profile.left_out)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def constants_text(constants: Mapping[str, float]) -> str:
    """Returns one line about the measured constants of a device, which are fields of [`Hardware`]."""
    shares = ", ".join(
        f"{what} {constants[name]:.0%}"
        for name, what in (
            ("matmul_efficiency", "products"),
            ("attention_efficiency", "attention"),
            ("memory_efficiency", "element-wise work (of the memory bandwidth)"),
        )
    )
    masked, block = (f"{constants[f'{form}_attention_share']:.0%}" for form in ("masked", "block"))
    return (
        f"Device: a launch takes {constants['launch_us']:.1f} us; shares of the peak: {shares}; attention reaches "
        f"{masked} of its rate with a dense mask, {block} with `bitfield`.\n{links_text(constants)}"
    )


def links_text(constants: Mapping[str, float]) -> str:
    """Returns one line about measured links, and links without a measurement."""
    parts = []
    for where, prefix, needed in (("in a node", "", "two ranks"), ("between nodes", "node_", "ranks on two nodes")):
        latency, sums = constants.get(f"{prefix}link_latency_us"), constants.get(f"{prefix}collective_latency_us")
        rates = [constants.get(f"{prefix}{kind}_gb_per_s") for kind in ("link", "message")]
        if latency is None:
            parts.append(f"{where} not measured, which needs {needed} under torchrun: the device table applies")
        elif sums is None:
            parts.append(f"{where} {latency:.1f} us for a copy; rates are those of the device table")
        else:
            parts.append(
                f"{where} {rates[0]:.3g} GB/s in sums and {rates[1]:.3g} GB/s in messages, {sums:.1f} us for each "
                f"step of a sum and {latency:.1f} us for a message"
            )
    return f"Links: {'; '.join(parts)}."


def profile_table(module: str, layers: list[MeasuredLayer]) -> Table:
    """A table of a module's measurements: times at each chunk, coefficients and errors of the fitted curves."""
    from rich.table import Table

    chunks = sorted({(point.tokens, point.sequences) for layer in layers for point in layer.points})
    table = Table(title=f"{module}: ms at tokens of a chunk, curves `a x² + b x + c`", title_justify="left")
    for name in ("layers", "tp", ""):
        table.add_column(name, no_wrap=True)
    for name in (*(_chunk(*chunk) for chunk in chunks), "a ns", "b µs", "c ms", "worst error"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in layers:
        rows = [name for name in LABELS if any(getattr(point, name) for point in layer.points)]
        for name in rows:
            heads = (_label(layer), str(layer.tp_size)) if name == rows[0] else ("", "")
            cells = _cells(layer, name, chunks)
            table.add_row(*heads, LABELS[name], *cells, end_section=name == rows[-1])
    return table


def _cells(layer: MeasuredLayer, name: str, chunks: list[tuple[int, int]]) -> Iterator[str]:
    """Times at each chunk, the coefficients, and the largest error of the curve."""
    times = {(point.tokens, point.sequences): f"{getattr(point, name):.3g}" for point in layer.points}
    yield from (times.get(chunk, "") for chunk in chunks)
    curve, polynomial = layer.curves[name], layer.curves[name].polynomial
    yield from (f"{n:.3g}" for n in (polynomial.square * 1e6, polynomial.token * 1e3, polynomial.constant))
    yield f"{curve.worst_error:.1%} at {_chunk(*curve.worst_point)}"


def misfits(profile: LayerProfile) -> Iterator[str]:
    """Yields a sentence for each curve with a large error."""
    for layer in profile.layers:
        for name, curve in layer.misfits.items():
            yield (
                f"Does not fit: {name.replace('_', ' ')} of {layer.module}, {_label(layer)}, with tp "
                f"{layer.tp_size} is off by {curve.worst_error:.0%} at {_chunk(*curve.worst_point)} tokens."
            )


def _chunk(tokens: int, sequences: int) -> str:
    """`1024`, or `4x256` for four sequences."""
    return f"{tokens:,}" if sequences == 1 else f"{sequences}x{tokens // sequences:,}"


def _label(layer: MeasuredLayer) -> str:
    return layer.kind if layer.kind in ("before", "after") else f"{layer.kind} {_ranges(layer.layers)}"


def _ranges(layers: tuple[int, ...]) -> str:
    """`0-31`, or `0-4 6-10`."""
    ends: list[list[int]] = []
    for layer in layers:
        if ends and layer == ends[-1][1] + 1:
            ends[-1][1] = layer
        else:
            ends.append([layer, layer])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _name(source: str) -> str:
    path = Path(source)
    if not path.exists():
        return source
    return (path.resolve().parent if path.is_file() else path.resolve()).name


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part.strip()) for part in text.split(","))
