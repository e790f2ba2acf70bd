"""
Fits the constants of a device to the published runs that are marked for it, by least squares of the logarithms of step
times, each study with the same weight. What it prints belongs into `hf_mmparallel/cost/devices.yaml`.

```bash
python benchmarks/fit_costs.py --device h100
```
"""

from __future__ import annotations

import argparse

import numpy as np
from published_study import Run, predicted_ms, studies
from scipy.optimize import least_squares

STARTS = {"matmul_efficiency": 0.6, "attention_efficiency": 0.3, "memory_efficiency": 0.7, "overlap_efficiency": 0.6}
MEASURED = {"h100": ("matmul_efficiency", "attention_efficiency", "overlap_efficiency"), "a100": ()}
"""Constants that are not fitted on a device but measured, see `hf_mmparallel/cost/devices.yaml`."""


def fitted_runs(device: str) -> list[tuple[Run, float]]:
    """The runs on a device that fit its constants, each with its weight."""
    found = []
    for study in studies():
        runs = [run for run in study.runs if run.is_fitted and study.data["device"] == device]
        found += [(run, len(runs) ** -0.5) for run in runs]
    return found


def fit(device: str, names: list[str]) -> tuple[dict[str, float], float]:
    """The constants, and the root of the mean squared error that is left."""
    runs = fitted_runs(device)
    weights = np.array([weight for _, weight in runs])

    def errors(logarithms: np.ndarray) -> np.ndarray:
        changes = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
        return weights * [np.log(predicted_ms(run, changes) / run.step_ms) for run, _ in runs]

    start = np.log([STARTS[name] for name in names])
    found = least_squares(
        errors, start, bounds=(np.log(0.05), 0.0), diff_step=0.02, ftol=1e-4, xtol=1e-3, loss="soft_l1", f_scale=0.1
    )
    left = float(np.sqrt((errors(found.x) ** 2).sum() / (weights**2).sum()))
    return dict(zip(names, np.exp(found.x).tolist(), strict=True)), left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=MEASURED, required=True)
    options = parser.parse_args()
    found, left = fit(options.device, [name for name in STARTS if name not in MEASURED[options.device]])
    for name, value in found.items():
        print(f"{name}: {value:.3f}")
    print(f"error that is left: {left:.1%} over {len(fitted_runs(options.device))} runs")


if __name__ == "__main__":
    main()
