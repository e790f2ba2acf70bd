"""
Compiles the attention kernels for GPUs that need not be here, and prints what the machine code takes.

```bash
python benchmarks/kernel_resources.py                 # what `tuning.py` chooses for 16-bit inputs on sm_80 and sm_90
python benchmarks/kernel_resources.py --arch 86 --everything
```

Registers and spilled bytes are those of a thread, shared memory that of a program. `tests/kernels` runs this file and
refuses spills and shared memory that a device does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

from hf_mmparallel.kernels.bitfield_attention import tuning  # noqa: E402
from hf_mmparallel.kernels.bitfield_attention.tuning import Tile  # noqa: E402

# Two for the row of the table that ends at 96: the widest, and one whose last columns are padding.
HEAD_DIMS = (64, 72, 96, 128, 256)
KERNELS = ("forward", "dkdv", "dq")
ROWS_TILE = 64  # as in `triton.py`, which would import Triton here
# Bytes that one program may have, by compute capability.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# Arguments by what they point at; any other is an integer.
TENSORS = ("query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value")
FLOATS = ("lse", "stats", "part_out", "part_lse", "sinks")
INTEGERS = ("tiles", "blocks", "rows", "columns", "query_rows", "key_rows", "row_first", "row_count", "key_first")


@dataclass(frozen=True)
class Case:
    """
    One kernel and how it is compiled.

    Args:
        arch (`int`): Compute capability, 90 for 9.0.
        kernel (`str`): `"forward"`, `"dkdv"` or `"dq"`, or one that adds up rows: `"combine"` or `"row_stats"`.
        head_dim (`int`): Head dimension.
        general (`bool`): Whether the mask is tested on the words instead of on intervals.
        softcap (`bool`): Whether scores are capped.
        sinks (`bool`): Whether there are sinks.
        dtype (`str`): `"bf16"`, `"fp16"` or `"fp32"`.
        block_q (`int`): Queries of a block of the plan.
        block_k (`int`): Keys of a block of the plan.
        tile (`Tile`): The tile.
        split (`bool`, *optional*, defaults to `False`): Whether some tiles of the forward pass are cut.
    """

    arch: int
    kernel: str
    head_dim: int
    general: bool
    softcap: bool
    sinks: bool
    dtype: str
    block_q: int
    block_k: int
    tile: Tile
    split: bool = False

    @property
    def name(self) -> str:
        """Short and unique."""
        flags = ["general" if self.general else "interval", *["softcap"] * self.softcap, *["sinks"] * self.sinks]
        flags += ["split"] * self.split
        return f"sm_{self.arch} {self.kernel} D{self.head_dim} {self.dtype} {' '.join(flags)}"


def constants(case: Case) -> dict[str, Any]:
    """Compile-time arguments by name, those that the kernel does not have too."""
    tile = case.tile
    from hf_mmparallel.kernels.bitfield_attention.triton import head_parts

    return {
        **head_parts(case.head_dim),
        "GROUP": 4,
        "BLOCK_Q": case.block_q,
        "BLOCK_K": case.block_k,
        "TILE_Q": tile.block_q,
        "TILE_K": tile.block_k,
        "GENERAL": case.general,
        "SOFTCAP": case.softcap,
        "SINKS": case.sinks,
        "SPLIT": case.split,
    }


def kernel_of(case: Case) -> Any:
    """The function of a case."""
    if case.kernel in ("forward", "combine"):
        from hf_mmparallel.kernels.bitfield_attention import triton_forward as module
    else:
        from hf_mmparallel.kernels.bitfield_attention import triton_backward as module
    return getattr(module, f"{case.kernel}_kernel")


def signature(kernel: Any, case: Case, fixed: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The type of each argument that is not compile-time, and those that are known to be multiples of 16."""
    types = {}
    for name in kernel.arg_names:
        if name in fixed:
            continue
        if name in ("scale", "score_scale", "cap"):
            types[name] = "fp32"
        elif name in INTEGERS:
            types[name] = "*i32"
        elif name in FLOATS:
            types[name] = "*fp32"
        elif name in TENSORS:
            types[name] = f"*{case.dtype}"
        else:
            types[name] = "i32"
    unknown = set(getattr(kernel, "do_not_specialize", ()))
    counts = {"num_heads", "num_kv_heads", "num_tiles", *unknown}
    return types, [name for name, kind in types.items() if kind != "fp32" and name not in counts]


def measure(case: Case) -> dict[str, Any]:
    """Compiles a case; registers, bytes of stack (spills) and of shared memory, or why it does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernel_of(case)
    fixed = {name: value for name, value in constants(case).items() if name in kernel.arg_names}
    types, multiples = signature(kernel, case, fixed)
    place = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(place(name),): value for name, value in fixed.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    options = {"num_warps": case.tile.num_warps, "num_stages": case.tile.num_stages, "enable_fp_fusion": True}
    started = time.perf_counter()
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)
    except Exception as error:  # the compiler raises whatever it likes
        return {"name": case.name, "error": f"{type(error).__name__}: {error}"[:500]}
    seconds = time.perf_counter() - started
    return {
        "name": case.name,
        "tile": asdict(case.tile),
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_MEMORY[case.arch],
        **machine_code(compiled.asm["cubin"]),
        "matrix_products": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma|\bmma\.sync", compiled.asm["ptx"])),
        "seconds": round(seconds, 2),
    }


def machine_code(cubin: bytes) -> dict[str, int]:
    """
    Registers and stack bytes of a thread, and how many instructions move spilled values, in loops and in all. Only
    code with a stack has some, so that no other is disassembled, which takes a quarter as long as compiling it.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dump(option: str) -> str:
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

        usage = dump("--dump-resource-usage")
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found is not None, usage
        registers, stack = int(found[1]), int(found[2])
        return {"registers": registers, "stack": stack, **_spill_moves(dump("-sass") if stack else "")}


def _spill_moves(assembly: str) -> dict[str, int]:
    """Loads and stores of spilled values; those inside of a loop that multiplies matrices are the ones that cost."""
    lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)([^;]*);", assembly)
    code = [(int(address, 16), name.split(".")[0], rest) for address, name, rest in lines]
    jumps = [(re.search(r"0x([0-9a-f]+)", rest), address) for address, name, rest in code if name == "BRA"]
    loops = [(int(to[1], 16), address) for to, address in jumps if to and int(to[1], 16) < address]
    products = [address for address, name, _ in code if name in ("HGMMA", "HMMA", "UTCHMMA")]
    loops = [loop for loop in loops if any(loop[0] <= address <= loop[1] for address in products)]
    # The innermost ones: those that hold no other.
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    moves = [address for address, name, _ in code if name in ("LDL", "STL")]
    in_loops = [address for address in moves if any(start <= address <= stop for start, stop in inner)]
    return {"spill_moves": len(moves), "spill_moves_in_loops": len(in_loops)}


def cases(archs: tuple[int, ...], everything: bool = False) -> Iterator[Case]:
    """
    What the table chooses for 16-bit inputs: all head dimensions; the general form, caps with sinks and cut tiles for
    some. Of float32, which runs without tensor cores, the forward kernel shows that. Or everything.
    """
    for arch in archs:
        capability = (arch // 10, arch % 10)
        for head_dim in HEAD_DIMS:
            yield from _kernels_of(arch, capability, head_dim)
        for head_dim in HEAD_DIMS if everything else (96, 128):
            yield from _kernels_of(arch, capability, head_dim, general=True)
        yield from _kernels_of(arch, capability, 128, softcap=True, sinks=True)
        yield from _splitting(arch, capability)
        if everything:
            yield from _kernels_of(arch, capability, 128, dtype="fp32")
        elif arch == 80:
            yield next(_kernels_of(arch, capability, 64, dtype="fp32"))


def _splitting(arch: int, capability: tuple[int, int]) -> Iterator[Case]:
    """The forward kernel with tiles that are cut, and the kernels that add up rows."""
    whole = next(_kernels_of(arch, capability, 128, sinks=True))
    yield replace(whole, split=True)
    for kernel in ("combine", "row_stats"):
        yield replace(whole, kernel=kernel, head_dim=96, tile=Tile(ROWS_TILE, whole.block_k, 4, 3))


def _kernels_of(
    arch: int,
    capability: tuple[int, int],
    head_dim: int,
    general: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    dtype: str = "bf16",
) -> Iterator[Case]:
    chosen = tuning.choose_tuning(capability, head_dim, not general, wide=dtype == "fp32")
    flags = (general, softcap, sinks, dtype, chosen.block_q, chosen.block_k)
    for kernel in KERNELS:
        yield Case(arch, kernel, head_dim, *flags, getattr(chosen, kernel))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="Compute capabilities, 90 for 9.0.")
    parser.add_argument("--only", default="", help="Only cases whose name has this text in it.")
    parser.add_argument("--everything", action="store_true", help="The general form for all head dimensions, too.")
    parser.add_argument("--json", action="store_true", help="One JSON list instead of the table.")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="Compiling processes.")
    options = parser.parse_args(arguments)
    if os.environ.pop("TRITON_INTERPRET", None) and "triton" in sys.modules:
        sys.exit("Triton was already imported for its interpreter; run this file in a process of its own.")
    chosen = [case for case in cases(tuple(options.arch), options.everything) if options.only in case.name]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        results = pool.map(measure, chosen)
        if options.json:
            print(json.dumps(list(results)))
            return
        print(f"{'kernel':64} {'tile':>8} warps  regs stack  moves (in loops)  shared")
        for result in results:
            print(_line(result), flush=True)


def _line(result: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in result:
        return f"{result['name']:64} {result['error'][:100]}"
    tile = f"{result['tile']['block_q']}x{result['tile']['block_k']}"
    moves = f"{result['spill_moves']:5} ({result['spill_moves_in_loops']})"
    too_much = "  MORE THAN THE DEVICE HAS" if result["shared"] > result["shared_limit"] else ""
    return (
        f"{result['name']:64} {tile:>8} {result['warps']:5} {result['registers']:5} {result['stack']:5}  {moves:16}"
        f" {result['shared']:7}{too_much}"
    )


if __name__ == "__main__":
    main()
