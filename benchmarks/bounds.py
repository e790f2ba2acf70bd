"""Bounds of a pipeline step: batches that could be divided at will, and the busiest stage alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix


@dataclass(frozen=True)
class StageWork:
    """
    Work of a stage for a whole batch.

    Args:
        forward_ms (`float`): All forwards together.
        backward_ms (`float`): All backwards together.
        module (`int`): 0 for the encoder, 1 for the language model; stages of one module take the same samples.
    """

    forward_ms: float
    backward_ms: float
    module: int

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


def even_ms(stages: Sequence[StageWork], num_microbatches: int) -> float:
    """
    The step of a batch that is cut into equal microbatches, as if samples could be divided: one microbatch through all
    stages, and the others through the busiest one (Entrain, equation 4.2).
    """
    totals = [stage.total_ms for stage in stages]
    return (sum(totals) + (num_microbatches - 1) * max(totals)) / num_microbatches


def divisible_ms(stages: Sequence[StageWork], num_microbatches: int) -> float:
    """
    The step of a batch of samples that are all alike and may be divided over the microbatches at will, under 1F1B: a
    linear program over the share of each microbatch in both modules and the start of each task.

    Equal shares are not the optimum, because small microbatches at both ends shorten warm-up and drain. A
    sample is computed by the language model in the encoder's microbatch or in the next one.

    It is exact for such a batch without deferral. Real samples can be faster: those with much text first keep the
    language model busy sooner, and a microbatch of the language model does not wait for what the encoder's defers.
    What no arrangement gets below is [`busiest_ms`].
    """
    program = _LinearProgram(stages, num_microbatches)
    program.order()
    program.defer()
    return program.solve()


def busiest_ms(stages: Sequence[StageWork]) -> float:
    """Work of the busiest stage, without warm-up and drain: no step is shorter."""
    return max(stage.total_ms for stage in stages)


class _LinearProgram:
    """Rows `sum of coefficients <= 0` over shares, starts of tasks, and the end, which is the last variable."""

    def __init__(self, stages: Sequence[StageWork], count: int):
        self.stages, self.count = stages, count
        self.num_variables = 2 * count + 2 * len(stages) * count + 1
        self.entries: list[tuple[int, int, float]] = []
        self.num_rows = 0

    def share(self, module: int, microbatch: int) -> int:
        return module * self.count + microbatch

    def start(self, stage: int, microbatch: int, backward: bool) -> int:
        return 2 * self.count + (2 * stage + backward) * self.count + microbatch

    def row(self, coefficients: Sequence[tuple[int, float]]) -> None:
        self.entries += [(self.num_rows, variable, value) for variable, value in coefficients]
        self.num_rows += 1

    def after(self, stage: int, microbatch: int, backward: bool, other: int) -> None:
        """`other` starts when a task is done."""
        work = self.stages[stage]
        duration = work.backward_ms if backward else work.forward_ms
        share = self.share(work.module, microbatch)
        self.row([(self.start(stage, microbatch, backward), 1.0), (share, duration), (other, -1.0)])

    def order(self) -> None:
        """Tasks after those that they need, and on each stage in the order of 1F1B."""
        last = len(self.stages) - 1
        for stage in range(last + 1):
            for microbatch in range(self.count):
                if stage < last:
                    self.after(stage, microbatch, False, self.start(stage + 1, microbatch, False))
                    self.after(stage + 1, microbatch, True, self.start(stage, microbatch, True))
            ahead = min(last + 1 - stage, self.count)
            tasks = [(index, False) for index in range(ahead)]
            for index in range(self.count):
                tasks.append((index, True))
                if ahead + index < self.count:
                    tasks.append((ahead + index, False))
            starts = [self.start(stage, *task) for task in tasks[1:]] + [self.num_variables - 1]
            for task, following in zip(tasks, starts, strict=True):
                self.after(stage, *task, following)

    def defer(self) -> None:
        """The language model takes no sample before the encoder does, nor more than one microbatch after it."""
        for microbatch in range(self.count):
            taken = [(self.share(1, index), 1.0) for index in range(microbatch + 1)]
            self.row(taken + [(self.share(0, index), -1.0) for index in range(microbatch + 1)])
            behind = [(variable, -1.0) for variable, _ in taken]
            self.row(behind + [(self.share(0, index), 1.0) for index in range(microbatch)])

    def solve(self) -> float:
        """The earliest end."""
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = coo_matrix((values, (rows, columns)), shape=(self.num_rows, self.num_variables)).tocsr()
        whole = np.zeros((2, self.num_variables))
        for module in range(2):
            whole[module, self.share(module, 0) : self.share(module, self.count)] = 1.0
        end = np.zeros(self.num_variables)
        end[-1] = 1.0
        return float(
            linprog(end, A_ub=matrix, b_ub=np.zeros(self.num_rows), A_eq=whole, b_eq=np.ones(2), method="highs").fun
        )
