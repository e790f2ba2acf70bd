"""The tables of ZeRO and of shared experts beside other libraries, and of predictions, see `pages.py`."""

from __future__ import annotations

from figures import ms, ratio, result, table


def sharding() -> str:
    """Time, memory and bytes sent of each variant on four ranks, and the ratios of ours to the best peer."""
    found = result("sharding")
    rows = []
    for name, row in found["ranks"]["4"].items():
        over = found["ratios"]["4"].get(name, {})
        cells = [ms(row["step_ms"]["median"]), ms(row["cpu_ms"]["median"])]
        cells += [f"{row['live_mib']:.0f}", f"{row['sent_mib']:.1f}"]
        cells += [ratio(over[key]) if over else "" for key in ("step_ms", "cpu_ms", "live_mib", "sent_mib")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return table("| variant | step ms | CPU ms | live tensors MiB | sent MiB | time | CPU | live | sent |", rows)


def experts() -> str:
    """Time, memory and bytes sent of each variant with experts, on all numbers of ranks."""
    rows = []
    for size, found in result("experts")["ranks"].items():
        for name, row in found.items():
            cells = [size, name, ms(row["step_ms"]["median"]), ms(row["cpu_ms"]["median"])]
            rows.append(f"| {' | '.join(cells)} | {row['live_mib']:.0f} | {row['sent_mib']:.1f} |")
    return table("| ranks | variant | step ms | CPU ms | live tensors MiB | sent MiB |", rows)


def sharded_simulation() -> str:
    """Predicted and measured steps with modelled durations."""
    header = "| layout | predicted ms | measured ms | error | exposed transfers |"
    rows = []
    for case in result("sharded_simulation")["cases"]:
        exposed = 1 - case["without_transfers_ms"] / case["predicted_ms"]
        times = f"{ms(case['predicted_ms'])} | {ms(case['measured_ms'])}"
        rows.append(f"| {case['case']} | {times} | {100 * case['error']:.1f} % | {100 * exposed:.1f} % |")
    return table(header, rows)


BLOCKS = {"sharding": sharding, "experts": experts, "sharded_simulation": sharded_simulation}
