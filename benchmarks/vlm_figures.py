"""The tables of `docs/qwen.md`: plans from one GPU to 512, and what packing gains; see `pages.py`."""

from __future__ import annotations

from typing import Any

from figures import result, table

ONE_GPU = {"Qwen3.5-9B": "all of it", "Qwen3.5-35B-A3B": "the projector", "Qwen3-VL-30B-A3B": "the projector"}


def plans_to_512() -> str:
    """Plans of three models on 1 to 512 H100, with their predictions."""
    rows = []
    for own in result("model_plans")["plans"]:
        trained = ONE_GPU[own["model"]] if own["gpus"] == 1 else "all of it"
        layouts = (own["layouts"][name].replace("one rank, ", "") for name in ("vision", "language_model"))
        speed = f"{own['step_ms'] / 1e3:.1f} | {own['tokens_per_second'] / own['gpus']:,.0f}"
        figures = f"{own['peak_memory_gib']:.0f} | {speed}"
        sizes = f"{own['gpus']} | {own['global_batch_size']:,}"
        rows.append(f"| {own['model']} | {sizes} | {trained} | {' | '.join(layouts)} | {figures} |")
    predicted = "GiB a GPU | step, s | tokens/s/GPU"
    return table(f"| model | GPUs | samples a step | trained | vision | language model | {predicted} |", rows)


def packing_gain() -> str:
    """Tokens per second padded, packed and arranged, over those padded: predicted, and measured on the CPU."""
    found, rows = result("packing_gain"), []
    speeds: dict[tuple[str, str], dict[str, Any]] = {}
    for own in found["predicted"]:
        speeds.setdefault((own["model"], own["dataset"]), {})[own["variant"]] = own["tokens_per_second"]
    for (model, dataset), own in speeds.items():
        padded = own["padded"]
        gains = " | ".join(f"{own[name] / padded:.2f}" for name in ("packed", "packed, arranged"))
        rows.append(f"| {dataset} | {model}, 8 H100, predicted | - | {padded:,.0f} | {gains} |")
    work: dict[str, dict[str, float]] = {}
    for own in found["measured"]:
        work.setdefault(own["dataset"], {})[own["variant"]] = own["tokens_per_processor_second"]["median"]
    for dataset, own in work.items():
        padded = own["padded"]
        ratios = [
            f"{own[name] / padded:.2f}" if name in own else "-"
            for name in ("TRL, padded", "packed", "packed, arranged")
        ]
        rows.append(
            f"| {dataset} | tiny model, two CPU ranks, a second of the processor | {ratios[0]} | {padded:,.0f} "
            f"| {ratios[1]} | {ratios[2]} |"
        )
    columns = "TRL, padded, times | padded, tokens/s | packed, times | packed and arranged, times"
    return table(f"| sizes of | model | {columns} |", rows)


BLOCKS = {function.__name__: function for function in (plans_to_512, packing_gain)}
