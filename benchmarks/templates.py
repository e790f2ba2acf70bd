"""
Pipeline templates and recovery from failures against Oobleck's evaluation (dissertation, chapter 2).

- `latency`: processor time for one exact template, on the sizes of table 2.3.
- `heuristic`: how much slower the stages are that the paper's divide and conquer finds, with its own four microbatches
  for each stage, than the exact ones; and steps with its distribution of microbatches (equation 2.6) than with ours.
- `throughput`: the traces of table 2.2 (30 nodes, one of which is lost every 6 h, 1 h or 10 min, until 15 are left)
  and random spot markets in the simulator, for the workloads of table 2.1: recovery in place, a grid with checkpoints
  (as Varuna), redundant stages (as Bamboo). One failure is survived for certain, in spot markets as many as nodes are
  lost at once at most; in place there are no checkpoints.

Layer times and memory are modelled for an A40 of 40 GB in TF32, with dense attention, recomputed activations (not
under Bamboo), and sequences of 512, 1,024 and 2,048 tokens; nothing is fitted to the paper's throughput, except that
`paper_speed` slows all systems down by the one factor with which ours has the paper's at 6 h. The seconds of Varuna's
checkpoints and new starts, and of Bamboo's, are those of the simulator that the authors published. Ours are 2 s, and
copies at 25 GB/s a node.

```bash
python benchmarks/templates.py
python benchmarks/templates.py --quick --out out/bench  # the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from oobleck_planner import deviating_least, divided
from paper_failures import EVERY_S, LAYERS, NO_CHECKPOINT, PLANNING_S, WORKLOADS, Workload
from policy_replay import RecoveryPolicy, SpotMarket, replay_trace
from recovery_policies import (
    EventCosts,
    GridRestart,
    RedundantStages,
    ReplayJob,
    TemplateRecovery,
    fastest_template,
    instantiations,
)
from rich.table import Table

from hf_mmparallel.cost import CostModel, analytic_costs, find_device
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes
from hf_mmparallel.resilience.model_chain import TypicalMicrobatches, model_chain
from hf_mmparallel.resilience.pipelines import layouts_of
from hf_mmparallel.resilience.templates import (
    Instantiation,
    LayerChain,
    PipelineTemplate,
    TemplateStage,
    fastest_instantiations,
    step_ms,
)
from hf_mmparallel.resilience.trace_replay import Trace, regular_losses

NODES, LEFT, FAILURES = 30, 15, 1
MEMORY_BYTES = 0.9 * 40 * 2**30
NODE_BYTES_PER_S = 25e9
BAMBOO_RESTART_S = 110.0
MARKETS = {"EC2 P3": (462.0, 3), "GCP": (618.0, 2)}
REPLACED_S, MARKET_S = 900.0, 12 * 3600.0
GOAL_S = 10.0
SPLITS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "equal layers and a head": lambda rng, count: np.append(np.ones(count - 1), 2.3),
    "random layers": lambda rng, count: rng.uniform(1, 2, count),
    "an encoder before": lambda rng, count: np.append(np.full(count // 3, 0.3), np.ones(count - count // 3)),
}


def latency(quick: bool) -> list[dict[str, Any]]:
    """Processor seconds of one template by nodes, GPUs of a node and layers."""
    rows = []
    for (nodes, size), paper in PLANNING_S.items():
        for layers, paper_s in zip(LAYERS, paper, strict=True):
            if quick and (nodes > 8 or layers > 32):
                continue
            counts = [count for count in (1, 2, 4, 8) if count <= size]
            layer_ms = np.random.default_rng(0).uniform(1, 2, layers)
            chain = LayerChain(counts, np.array([layer_ms / count**0.8 for count in counts]))
            num_layers = np.arange(layers + 1)[None] - np.arange(layers)[:, None]
            # A rank has memory for 128 forwards of a layer.
            in_flight = [np.where(num_layers > 0, 128 * count // np.maximum(num_layers, 1), 0) for count in counts]
            row: dict[str, Any] = {"nodes": nodes, "size": size, "layers": layers, "paper_s": paper_s}
            for key, own in (("s", chain), ("limited_s", replace(chain, fits_in_flight=np.array(in_flight)))):
                start = time.process_time()
                template = fastest_template(own, nodes, size, 4 * nodes)
                row[key] = time.process_time() - start
                row[f"stages_{key}"] = 0 if template is None else len(template.stages)
            rows.append(row)
    return rows


def heuristic(quick: bool) -> list[dict[str, Any]]:
    """How much slower a step is with the paper's stages, of the closed form that both have for 1F1B."""
    sizes = (
        ((2, 1, 8), (2, 2, 6)) if quick else ((4, 1, 24), (8, 1, 24), (12, 1, 32), (3, 2, 16), (2, 4, 16), (4, 4, 24))
    )
    rows = []
    for nodes, size, layers in sizes:
        for name, draw in SPLITS.items():
            slower, fewest = [], []
            for seed in range(1 if quick or name != "random layers" else 10):
                costs = draw(np.random.default_rng(seed), layers)
                layer_ms = np.array([costs / count**0.8 for count in range(1, size + 1)])
                chain = LayerChain(list(range(1, size + 1)), layer_ms)
                parts = [divided(layer_ms, stages, nodes, size) for stages in range(nodes, nodes * size + 1)]
                found = [part for part in parts if part is not None]
                chosen = min(found, key=lambda part: part.estimate_ms)
                fewest.append(len(chosen.stages_ms) == nodes)
                count = 4 * nodes
                exact = fastest_template(chain, nodes, size, count)
                assert exact is not None
                own_ms = step_ms(sum(chosen.stages_ms), max(chosen.stages_ms), count)
                slower.append(max(own_ms / exact.step_ms(count) - 1, 0.0))
            rows.append({"nodes": nodes, "size": size, "layers": layers, "costs": name, "worst": max(slower)})
            rows[-1] |= {"mean": float(np.mean(slower)), "fewest_stages": all(fewest)}
    return rows


def distribution(quick: bool) -> dict[str, Any]:
    """Steps of unequal pipelines with the microbatches of equation 2.6, over those with ours."""
    rng, slower = np.random.default_rng(0), []
    for _ in range(5 if quick else 300):
        templates = []
        for stages in rng.integers(1, 9, rng.integers(2, 7)).tolist():
            own = (TemplateStage((i, i + 1), 1, 100.0 / stages * rng.uniform(1, 1.2)) for i in range(stages))
            templates.append(PipelineTemplate(stages, tuple(own)))
        count = int(rng.integers(len(templates), 8 * len(templates) + 1))
        chosen = deviating_least([one.slowest_ms for one in templates], count)
        theirs = Instantiation(tuple(templates), tuple(chosen)).step_ms
        slower.append(theirs / Instantiation.of(templates, count).step_ms - 1)
    return {"cases": len(slower), "mean": float(np.mean(slower)), "worst": max(slower)}


def listing(quick: bool) -> list[dict[str, Any]]:
    """All instantiations of equation 2.5 beside the dynamic program: their number, both times, both results."""
    rows = []
    for num_nodes in (12,) if quick else (20, 30, 40):
        chain = LayerChain([1], np.random.default_rng(0).uniform(1, 2, (1, 32)))
        counts, count = range(4, num_nodes - 4 + 1), 16 * num_nodes
        found = (fastest_template(chain, nodes, 1, count * nodes // num_nodes) for nodes in counts)
        templates = [one for one in found if one is not None]
        start = time.process_time()
        every = list(instantiations(num_nodes, [one.num_nodes for one in templates], 2))
        steps = (
            Instantiation.of([t for t, n in zip(templates, numbers, strict=True) for _ in range(n)], count).step_ms
            for numbers in every
        )
        least_ms = min(steps)
        middle = time.process_time()
        (best,) = fastest_instantiations(templates, num_nodes, 2, count, most=1)
        assert abs(best.step_ms / least_ms - 1) < 1e-9
        seconds = {"all_s": middle - start, "best_s": time.process_time() - middle}
        rows.append({"nodes": num_nodes, "instantiations": len(every), **seconds})
    return rows


@cache
def costs_of(name: str) -> CostModel:
    """Layers of a workload on an A40 in TF32, with dense attention."""
    from transformers import AutoConfig

    load, ids = WORKLOADS[name], dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes = {"hidden_size": load.hidden_size, "intermediate_size": 4 * load.hidden_size}
    heads = {"num_attention_heads": load.num_heads, "num_key_value_heads": load.num_heads}
    config = AutoConfig.for_model(  # a GPT: two matrices behind attention, layer norms with biases
        "starcoder2", **sizes, **heads, **ids, num_hidden_layers=load.num_layers, vocab_size=load.vocab_size
    )
    spec = build_model_spec(build_on_meta(config, torch.float32))
    language = replace(spec.modules[LANGUAGE_MODEL], attention="eager")
    spec = replace(spec, modules={**spec.modules, LANGUAGE_MODEL: language})
    return replace(analytic_costs(spec, find_device("a40").computing_in("tf32")), value_bytes=4)


def job_of(name: str, batch: int, bamboo: bool = False, slower: float = 1.0) -> ReplayJob:
    """A workload with a global batch; `slower` times as slow as modelled."""
    load = WORKLOADS[name]
    size = load.bamboo_microbatch if bamboo else load.microbatch
    count, sizes = -(-batch // size), SampleSizes.uniform({LANGUAGE_MODEL: load.seq_len}, size, known=True)
    plugins = {LANGUAGE_MODEL: ModulePlugin(activation_checkpointing=not bamboo)}
    microbatches = TypicalMicrobatches(sizes, size, -(-count // (FAILURES + 1)))
    found = model_chain(
        costs_of(name), layouts_of(plugins), microbatches, MEMORY_BYTES, state_copies=2 if bamboo else 1
    )
    chain = replace(found.chain, layer_ms=slower * np.asarray(found.chain.layer_ms))
    return ReplayJob(chain, found.state_bytes, 1, count, batch, NODES)


def policies(
    name: str, batch: int, slower: float, failures: int
) -> Iterator[tuple[str, Callable[[Trace], RecoveryPolicy]]]:
    """Names of the ways to recover, and how to make each for a trace."""
    load = WORKLOADS[name]
    job, bamboo = job_of(name, batch, slower=slower), job_of(name, batch, True, slower)
    own = EventCosts(copy_bytes_per_s=NODE_BYTES_PER_S, save_s=load.save_s, restart_s=load.restart_s)
    yield "Oobleck", lambda _: TemplateRecovery(job, own, failures)
    yield "weighed", lambda trace: TemplateRecovery(job, own, failures, trace.mean_time_between_losses_s)
    yield "Varuna", lambda _: GridRestart(job, own)
    if name in NO_CHECKPOINT:
        yield "Varuna, free checkpoints", lambda _: GridRestart(job, replace(own, save_s=0.0, save_every=2))
    if bamboo.fewest_nodes is not None:
        yield "Bamboo", lambda _: RedundantStages(bamboo, replace(own, restart_s=BAMBOO_RESTART_S))


def replayed(
    name: str, batch: int, traces: dict[str, Trace], slower: float = 1.0, failures: int = FAILURES
) -> dict[str, Any]:
    """System -> trace -> throughput and shares of the nodes' time."""
    result: dict[str, Any] = {}
    for system, made in policies(name, batch, slower, failures):
        result[system] = {}
        for trace_name, trace in traces.items():
            replay = replay_trace(trace, made(trace), batch)
            result[system][trace_name] = {"rate": replay.samples_per_second, "shares": replay.shares}
    return result


def throughput(quick: bool) -> list[dict[str, Any]]:
    """Every workload under every trace: with the table's batch, the simulator's, and layers as slow as the paper's."""
    traces = {name: regular_losses(NODES, every_s, NODES - LEFT) for name, every_s in EVERY_S.items()}
    markets = {
        name: SpotMarket(NODES, every_s, at_once, REPLACED_S).trace(MARKET_S)
        for name, (every_s, at_once) in MARKETS.items()
    }
    rows = []
    for name, load in list(WORKLOADS.items())[: 1 if quick else None]:
        own = replayed(name, load.simulator_batch, traces)
        for market, (_, at_once) in MARKETS.items():
            for system, found in replayed(name, load.simulator_batch, markets, failures=at_once).items():
                own[system][market] = found[market]
        slower = own["Oobleck"]["6h"]["rate"] / load.throughput["Oobleck"][0]
        rows.append(
            {
                "workload": name,
                "fewest_nodes": job_of(name, load.batch).fewest_nodes,
                "slower": slower,
                "table": replayed(name, load.batch, traces),
                "simulator": own,
                "paper_speed": replayed(name, load.simulator_batch, traces, slower),
                "paper": _published(name, load),
            }
        )
    return rows


def _published(name: str, load: Workload) -> dict[str, dict[str, float]]:
    """System -> trace -> throughput in the paper."""
    found = {**load.throughput}
    if name in NO_CHECKPOINT:
        found["Varuna, free checkpoints"] = NO_CHECKPOINT[name]
    return {system: dict(zip(EVERY_S, rates, strict=True)) for system, rates in found.items()}


def kept(rates: dict[str, Any]) -> float:
    """Throughput at a loss every 10 minutes over that at one every 6 hours."""
    slow, fast = (rates[name] if isinstance(rates[name], float) else rates[name]["rate"] for name in ("10m", "6h"))
    return slow / fast if fast else 0.0


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """The printed tables."""
    table = Table(
        "nodes x GPUs",
        *(f"{layers} layers" for layers in LAYERS),
        title="Seconds for a template, with limited memory / paper's",
    )
    for nodes, size in PLANNING_S:
        own = [row for row in result["latency"] if (row["nodes"], row["size"]) == (nodes, size)]
        if own:
            table.add_row(
                f"{nodes} x {size}",
                *(f"{row['s']:.2f}, {row['limited_s']:.2f} / {row['paper_s']:,.2f}" for row in own),
            )
    yield table
    table = Table(
        "nodes x GPUs", "layers", "costs", "slower: mean", "worst", "fewest stages", title="Divide and conquer"
    )
    for row in result["heuristic"]:
        cells = (f"{row['mean']:.1%}", f"{row['worst']:.1%}", "yes" if row["fewest_stages"] else "no")
        table.add_row(f"{row['nodes']} x {row['size']}", str(row["layers"]), row["costs"], *cells)
    yield table
    for kind in ("table", "simulator", "paper_speed"):
        table = Table("workload", "system", *EVERY_S, "kept", "paper: 6h", "10m", "kept", title=f"Throughput: {kind}")
        for row in result["throughput"]:
            for system, rates in row[kind].items():
                paper = row["paper"].get(system)
                printed = (
                    ["", "", ""] if paper is None else [f"{paper['6h']}", f"{paper['10m']}", f"{kept(paper):.1%}"]
                )
                cells = [f"{rates[name]['rate']:.2f}" for name in EVERY_S] + [f"{kept(rates):.1%}"]
                table.add_row(row["workload"], system, *cells, *printed)
        yield table
    table = Table("workload", "system", *MARKETS, title="Throughput under spot markets")
    for row in result["throughput"]:
        for system, rates in row["simulator"].items():
            table.add_row(row["workload"], system, *(f"{rates[name]['rate']:.2f}" for name in MARKETS))
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few small cases, to try the script itself")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()
    result: dict[str, Any] = {
        "latency": latency(options.quick),
        "heuristic": heuristic(options.quick),
        "distribution": distribution(options.quick),
        "listing": listing(options.quick),
        "throughput": throughput(options.quick),
        "goals": {"latency_s": GOAL_S},
        **common.machine(common.QUICK, load),
    }
    slowest = max(result["latency"], key=lambda row: row["limited_s"])
    notes = [
        f"Slowest template: {slowest['limited_s']:.1f} s for {slowest['nodes']} nodes x {slowest['size']} GPUs x "
        f"{slowest['layers']} layers (goal {GOAL_S:.0f} s, paper {slowest['paper_s']:,.0f} s).",
        f"Equation 2.6: a step is {result['distribution']['mean']:.1%} slower on average than with ours, "
        f"{result['distribution']['worst']:.0%} at most.",
        *(
            f"{row['nodes']} nodes: {row['instantiations']:,} instantiations in {row['all_s']:.2f} s, the best one of "
            f"them by dynamic programming in {row['best_s']:.3f} s."
            for row in result["listing"]
        ),
    ]
    common.report("templates", list(tables(result)), notes, result, options.out)


if __name__ == "__main__":
    main()
