"""Small models with what a plan has to respect: frozen parts, several encoders, layers that can't be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from hf_mmparallel.cost import CostModel, analytic_costs
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes
from hf_mmparallel.resilience.model_chain import ModelChain, TypicalMicrobatches, model_chain
from hf_mmparallel.resilience.templates import LayerChain, PipelineTemplate, TemplateSearch
from tests.cost.models import PLAIN
from tests.tiny import FAMILIES

MODELS: Mapping[str, Mapping[str, bool | str]] = {
    "llama_tied": {},
    "llava": {"vision": "tower"},
    "gemma3": {"vision": True, LANGUAGE_MODEL: r"layers\.[01]\."},
    "qwen3_vl": {},
    "qwen2_5_omni": {"audio": True},
}
"""Family -> frozen parts of its modules."""


@cache
def costs_of(family: str) -> CostModel:
    """Costs on an H100 without launches and latencies."""
    spec = build_model_spec(FAMILIES[family]())
    frozen = MODELS[family]
    modules = {name: module.with_frozen(frozen.get(name, False)) for name, module in spec.modules.items()}
    return analytic_costs(replace(spec, modules=modules), PLAIN)


def typical(spec: ModelSpec, most: int = 8) -> TypicalMicrobatches:
    """Two microbatches of two samples each, of which one sample has no media."""
    tokens = {
        name: [[192], [256], [256], [64]] if name == LANGUAGE_MODEL else [[64], [], [32, 32], [16]]
        for name in spec.modules
    }
    return TypicalMicrobatches(SampleSizes.of_sequences(tokens), 2, most)


def chain_of(
    family: str,
    modules: Mapping[str, ModulePlugin] | None = None,
    memory_bytes: float | None = None,
    sizes: Sequence[int] = (),
) -> ModelChain:
    """The chain of a model whose stages have one of these tensor-parallel sizes; by default that of its module."""
    costs = costs_of(family)
    tp_sizes = dict.fromkeys(costs.spec.modules, sizes) if sizes else None
    return model_chain(costs, modules or {}, typical(costs.spec), memory_bytes, tp_sizes=tp_sizes)


def fastest_template(
    chain: LayerChain, num_nodes: int, node_size: int, num_microbatches: int, most_in_flight: int = 0
) -> PipelineTemplate | None:
    """The fastest template, with memory for `most_in_flight` microbatches if these are more than those of a step."""
    search = TemplateSearch(chain, node_size, num_nodes, most_in_flight or num_microbatches)
    return search.fastest(num_nodes, num_microbatches)


def instantiations(num_nodes: int, counts: Sequence[int], fewest_pipelines: int) -> Iterator[tuple[int, ...]]:
    """The numbers of pipelines of each number of nodes, for all ways to use all nodes (Oobleck, equation 2.5)."""

    def extend(index: int, nodes: int) -> Iterator[tuple[int, ...]]:
        if index == len(counts):
            if nodes == 0:
                yield ()
            return
        for number in range(nodes // counts[index] + 1):
            for rest in extend(index + 1, nodes - number * counts[index]):
                yield (number, *rest)

    return (numbers for numbers in extend(0, num_nodes) if sum(numbers) >= fewest_pipelines)
