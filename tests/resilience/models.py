"""Small models with what a plan has to respect: frozen parts, several encoders, layers that can't be cut."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from hf_mmparallel.cost import CostModel, analytic_costs
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes
from hf_mmparallel.resilience.model_chain import ModelChain, TypicalMicrobatches, model_chain
from hf_mmparallel.resilience.pipelines import layouts_of
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
    return model_chain(costs, layouts_of(modules or {}), typical(costs.spec), memory_bytes, tp_sizes=tp_sizes)
