"""Programs with one change, which the proof refuses or the checker finds valid."""

import random

import numpy as np

from hf_mmparallel.schedule.action_lists import PartActions

CHANGES = ("swap", "move", "double", "drop", "other", "to another rank")


def changed(rows: PartActions, change: str, num_codes: int, generator: random.Random) -> PartActions:
    """The lists, of two actions or more, with one of `CHANGES`."""
    codes, starts = rows.codes.copy(), rows.starts.copy()
    i, j = sorted(generator.sample(range(len(codes)), 2))
    if change == "swap":
        codes[[i, j]] = codes[[j, i]]
    elif change == "move":
        codes[i : j + 1] = np.roll(codes[i : j + 1], 1)
    elif change == "double":
        codes[i] = codes[j]
    elif change == "drop":
        codes, starts = np.delete(codes, i), starts - (starts > i)
    elif change == "to another rank":
        codes, starts = np.insert(np.delete(codes, i), j - 1, codes[i]), starts - ((starts > i) & (starts <= j))
    else:
        codes[i] = generator.randrange(num_codes)
    return PartActions(rows.graph, starts, codes, rows.list_of)
