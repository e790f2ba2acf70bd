"""
Draws the picture of `arrangement.md`: samples of a published shape, in the sampler's order and arranged.

```bash
python docs/draw_workloads.py
```
"""

from __future__ import annotations

import sys
from pathlib import Path

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.arrange.balance import step_balance
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from hf_mmparallel.planning.workload_chart import BEFORE, balance_png

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION  # noqa: E402

PICTURE = Path(__file__).parent / "images" / "workloads.png"
HEADINGS = {BEFORE: "contiguous", "hierarchical": "hierarchical", "tapered": "tapered"}
DP_SIZE, NUM_MICROBATCHES, MICROBATCH_SIZE = 2, 16, 4


def main() -> None:
    """Two replicas with sixteen microbatches each."""
    model = PUBLISHED_MODELS["llama3-3b"]
    module = ModulePlugin(dp_size=DP_SIZE, pp_size=2)
    plan = resolve_plan(model.spec, {VISION: module, LANGUAGE_MODEL: module})
    num_samples = DP_SIZE * NUM_MICROBATCHES * MICROBATCH_SIZE
    workloads = model.workloads(PUBLISHED["synthchartnet"].draw(num_samples, seed=0))
    panels = {}
    for heading, method in HEADINGS.items():
        panels[heading] = step_balance(
            arrange_step(plan, range(num_samples), workloads, MICROBATCH_SIZE, method), workloads
        )
    balance_png(panels, PICTURE, "Predicted forward of each microbatch")


if __name__ == "__main__":
    main()
