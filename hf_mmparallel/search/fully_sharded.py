"""Baseline in the manner of FSDP: every rank is data-parallel for all modules, which share all of their parameters."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost.sharded_passes import GATHERS_IN_PASSES
from ..plan import LANGUAGE_MODEL
from ..plan.parallel_plan import ShardingSettings
from .candidates import MOST_MICROBATCHES
from .options import ModuleOptions, ParallelConfig, divisors
from .problem import Candidate, Layout, PlanningProblem


class FullyShardedLayouts:
    """
    All plans with every rank data-parallel and every parameter shared, by all ranks or by those of a node (hybrid
    sharding), with recomputation in all modules or in none; sizes set by the user do not apply.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem = problem
        self.options = {name: ModuleOptions(problem, name) for name in problem.spec.modules}

    def __iter__(self) -> Iterator[Candidate]:
        """All candidates, fastest first by the closed form."""
        return iter(sorted(self._candidates(), key=self._estimate_ms))

    def _candidates(self) -> Iterator[Candidate]:
        problem = self.problem
        num_ranks, node_size = problem.num_ranks, problem.costs.device.node_size
        replica, rest = divmod(problem.global_batch_size, num_ranks)
        if rest or num_ranks == 1:
            return
        counts = [count for count in divisors(replica) if count <= MOST_MICROBATCHES]
        if problem.microbatch_size is not None:
            counts = [-(-replica // problem.microbatch_size)]
        colocated = {name: LANGUAGE_MODEL for name in problem.spec.modules if name != LANGUAGE_MODEL}
        sizes = [None, node_size] if 1 < node_size < num_ranks and num_ranks % node_size == 0 else [None]
        for shard_size in sizes:
            sharding = ShardingSettings(GATHERS_IN_PASSES, shard_size)
            for recompute in (False, True):
                recomputed = {name: problem.checkpointing.get(name, recompute) for name in problem.spec.modules}
                if not recompute and list(recomputed.values()).count(True) == len(recomputed):
                    continue
                layouts = {
                    name: Layout((module.num_layers,), num_ranks, 1, 1, recomputed[name], sharding)
                    for name, module in problem.spec.modules.items()
                }
                for count in counts:
                    yield Candidate(layouts, colocated, count, problem.first_schedule)

    def _estimate_ms(self, candidate: Candidate) -> float:
        """Time of all microbatches of a replica in sequence, of gradient sums and of the optimizer step."""
        num_samples = self.problem.global_batch_size / self.problem.num_ranks / candidate.num_microbatches
        result = 0.0
        for name, layout in candidate.layouts.items():
            plain = ParallelConfig(1, 1, layout.activation_checkpointing, sharding=layout.sharding)
            kind = plain.with_shards(layout.dp_size)
            layers_ms = float(self.options[name].layer_ms(kind, num_samples).sum())
            result += candidate.num_microbatches * layers_ms + self.options[name].sync_ms(kind, layout.dp_size, 1)
        return result
