"""
Checks a plan on one CUDA device against the stock Trainer on it. Prints a table and one JSON line, which is kept.

```bash
python benchmarks/gpu_check.py
python benchmarks/gpu_check.py --cpu  # the first layout on the CPU, to try the script itself
python benchmarks/gpu_check.py --only gemma3  # one family; the rows of others that are kept stay
```

Tiny models on the same data: the stock Trainer, and plans whose four ranks share the device, with gloo through host
memory, since NCCL takes one rank a device. Losses and gradient norms must agree at float32 rounding, and under bf16
autocast at its precision.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES = [("llava", False), ("llava", True), ("qwen2_vl", False), ("gemma3", False), ("qwen3_vl", False)]
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp 2, pp 2": ({"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}}, {}),
    "dp 2, cp 2, packed": ({"vision": {"dp_size": 2}, "language_model": {"cp_size": 2}}, {"packing": True}),
}
"""Modules, and further arguments. Without tp: the gathers of DTensor over gloo crash (pytorch issue 152645)."""
TOLERANCE = {False: 2e-4, True: 2e-2}


def run_rank(family: str, bf16: bool, layout: str) -> None:
    """Trains on this rank; rank 0 prints its logs as JSON."""
    sys.path.insert(0, str(ROOT))
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    from tests.trainer import runs

    on_cpu = bool(os.environ.get("GPU_CHECK_ON_CPU"))
    common = {"use_cpu": on_cpu, "bf16": bf16, "max_steps": 4}
    started = time.perf_counter()
    if layout == "stock":
        logs = runs.stock(family, per_device_train_batch_size=8, **common).logs
    else:
        modules, arguments = LAYOUTS[layout]
        trainer = runs.make_trainer(family, modules, **common, **arguments)
        trainer.train()
        logs = runs.step_logs(trainer)
        assert trainer.engine.device.type == ("cpu" if on_cpu else "cuda")
    if int(os.environ.get("RANK", 0)) == 0:
        print("LOGS " + json.dumps({"logs": logs, "seconds": time.perf_counter() - started}), flush=True)


def launch(family: str, bf16: bool, layout: str) -> dict[str, Any]:
    """Starts the ranks of a layout on device 0 and returns what rank 0 printed."""
    world = 1 if layout == "stock" else 4
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            environment = {
                **os.environ,
                "HF_MMPARALLEL_TEST_RUNS": folder,
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            }
            if layout != "stock":
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            command = [sys.executable, __file__, "--rank", family, str(int(bf16)), layout]
            path = Path(folder) / f"{rank}.txt"
            with path.open("w") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        for process in processes:
            process.wait(timeout=240)
        texts = [(Path(folder) / f"{rank}.txt").read_text() for rank in range(world)]
    found = [line for line in texts[0].splitlines() if line.startswith("LOGS ")]
    if not found:
        raise RuntimeError(f"{family} {layout} failed:\n" + "\n".join(text[-2500:] for text in texts))
    return json.loads(found[0].removeprefix("LOGS "))


def difference(logs: list[dict[str, float]], reference: list[dict[str, float]]) -> float:
    """The largest relative difference of losses and gradient norms."""
    return max(
        abs(got[name] - want[name]) / abs(want[name])
        for got, want in zip(logs, reference, strict=True)
        for name in ("loss", "grad_norm")
    )


def main() -> int:
    import common
    import torch
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="The first layout on the CPU.")
    parser.add_argument("--only", choices=sorted({family for family, _ in CASES}), help="One family.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="Folder of the JSON.")
    options = parser.parse_args()
    load, only = os.getloadavg(), options.only
    if options.cpu:
        os.environ["GPU_CHECK_ON_CPU"] = "1"
    elif not torch.cuda.is_available():
        print("gpu_check needs a CUDA device; `--cpu` tries the script itself.")
        return 2
    file = options.out / "gpu_check.json"
    kept = json.loads(file.read_text())["rows"] if only and file.exists() else []
    table = Table("family", "precision", "layout", "largest difference", "allowed", "ok")
    rows = [row for row in kept if row["family"] != only]
    chosen = [case for case in CASES if only in (None, case[0])]
    layouts = list(LAYOUTS)[:1] if options.cpu else list(LAYOUTS)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        references = [pool.submit(launch, *case, "stock") for case in chosen]
        runs = [pool.submit(launch, *case, layout) for case in chosen for layout in layouts]
    for number, run in enumerate(runs):
        (family, bf16), layout = chosen[number // len(layouts)], layouts[number % len(layouts)]
        row: dict[str, Any] = {"family": family, "bf16": bf16, "layout": layout, "allowed": TOLERANCE[bf16]}
        try:
            found, reference = run.result(), references[number // len(layouts)].result()
            row |= {"difference": difference(found["logs"], reference["logs"]), "seconds": round(found["seconds"], 2)}
            row["ok"] = row["difference"] <= row["allowed"]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error)
            row |= {"difference": None, "ok": False}
        rows.append(row)
        cells = (family, "bf16" if bf16 else "fp32", layout, str(row["difference"]), str(row["allowed"]))
        table.add_row(*cells, "yes" if row["ok"] else "NO")
    device = "cpu" if options.cpu else torch.cuda.get_device_name()
    machine = common.machine(common.QUICK, load)
    machine.pop("shapes")  # the models are those of tests/tiny.py
    common.report("gpu_check", [table], [], {"device": device, "rows": rows, **machine}, options.out)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], bool(int(sys.argv[3])), sys.argv[4])
    else:
        sys.exit(main())
