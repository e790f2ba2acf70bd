"""Runs that others published, and what the planner predicts for them: read from `benchmarks/published`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hf_mmparallel.cost import CostModel, Hardware, analytic_costs, find_device, training_flops
from hf_mmparallel.cost.layers import Engine
from hf_mmparallel.cost.ledger import TERMS, Ledger, ledger_of
from hf_mmparallel.cost.step_planner import Prediction, StepPlanner
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    resolve_plan,
    sync_groups,
)

FOLDER = Path(__file__).parent / "published"
RECOMPUTED = {"none": (False,), "full": (True,), "selective": (False, True)}
"""Selective recomputation computes about half of a layer again: the mean of none and full."""


@dataclass(frozen=True)
class Run:
    """
    A run as published.

    Args:
        study (`Study`): What it belongs to.
        values (`Mapping[str, Any]`): Its columns, with the defaults of the study.
    """

    study: Study
    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError as error:
            raise AttributeError(name) from error

    @property
    def is_fitted(self) -> bool:
        return self.values.get("use", "judge") == "fit" or self.model in self.study.data.get("fit_models", ())

    @property
    def device(self) -> Hardware:
        """The device, with what differs from its table in this study."""
        found = find_device(self.values.get("device", self.study.data["device"]))
        return replace(found, **self.study.data.get("device_changes", {}))

    @property
    def spec(self) -> ModelSpec:
        """The model with the attention of the study's engine, and sequence parallelism where that has it."""
        return model_spec(self.study.key, self.model, self.lora)

    @property
    def judges_memory(self) -> bool:
        """Whether its peak is published, with all on the device and logits in parts, as hf_mmparallel has them."""
        return "peak_gib" in self.values and self.lora and not self.offload

    @property
    def is_sharded(self) -> bool:
        """Whether its parameters are sharded: FSDP without pipeline stages."""
        return bool(self.study.has_sharded_optimizer and self.study.is_fsdp and self.pp == 1)

    @property
    def dp_size(self) -> int:
        return self.values.get("dp") or self.gpus // (self.tp * self.pp * self.cp)

    @property
    def num_tasks(self) -> int:
        """Forwards of a step that are simulated."""
        return self.pp * self.batch // self.microbatch

    @property
    def step_ms(self) -> float:
        """The measured time."""
        values = self.values
        if values.get("step_s") is not None:
            return 1e3 * values["step_s"]
        if "tokens_per_s_per_gpu" in values:
            return 1e3 * self.batch * self.seq_len / self.gpus / values["tokens_per_s_per_gpu"]
        if "model_tflops_per_gpu" in values:
            return published_flops(self) / (1e9 * values["model_tflops_per_gpu"] * self.gpus)
        if "hours" in values:
            return 3.6e6 * values["hours"] * self.batch / self.study.data["samples"]
        return self._megatron_flops() / (1e9 * values["tflops_per_gpu"] * self.gpus)

    def _megatron_flops(self) -> float:
        """Equation 3 of Narayanan et al., with recomputation."""
        config = self.study.data["models"][self.model]
        layers, hidden, vocab = (config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
        rest = 1 + self.seq_len / (6 * hidden) + vocab / (16 * layers * hidden)
        return 96 * self.batch * self.seq_len * layers * hidden**2 * rest

    @property
    def why_missed(self) -> str | None:
        """What its study says of runs like it that are predicted badly."""
        device = {"device": self.device.name}
        fits = (
            own
            for own in self.study.data.get("misses", ())
            if own["where"].items() <= {**self.values, **device}.items()
        )
        return next((own["why"] for own in fits), None)

    @property
    def name(self) -> str:
        sizes = " ".join(
            f"{key} {self.values[key]}" for key in ("dp", "tp", "pp", "vp", "cp", "ep") if self.values[key] > 1
        )
        words = [self.model, f"{self.gpus} GPUs", sizes, f"microbatch {self.microbatch}", f"sequence {self.seq_len}"]
        words += [f"{self.recompute} recomputation"] if self.recompute != "none" else []
        words += ["compiled"] if self.values.get("fused") else []
        words += ["LoRA"] if self.lora else []
        words += [self.device.name] if "device" in self.values else []
        words += [self.dtype] if self.dtype == "float8" else []
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Study:
    """
    A table of runs.

    Args:
        key (`str`): Name of its file.
        data (`Mapping[str, Any]`): The file.
    """

    key: str
    data: Mapping[str, Any]

    @property
    def engine(self) -> Engine:
        of_model = ("attention", "sequence_parallel", "sharded_optimizer")
        known = {name: value for name, value in self.data["engine"].items() if name not in of_model}
        if "message_gb_per_s" in known:
            known["message_gb_per_s"] = tuple(known["message_gb_per_s"])
        in_place = {"sums_in_place": known.get("fused", False)}
        return Engine(**{"wide_sums": False, "early_sums": False, **in_place, **known})

    @property
    def has_sharded_optimizer(self) -> bool:
        return self.data["engine"].get("sharded_optimizer", False)

    @property
    def without_assumptions(self) -> Study:
        """The same runs without what was set by hand to them (`assumed`): launches and links as of any other study."""
        assumed = set(self.data.get("assumed", ()))
        parts = ("engine", "device_changes")
        kept = {part: {k: v for k, v in self.data.get(part, {}).items() if k not in assumed} for part in parts}
        return replace(self, data={**self.data, **kept})

    @property
    def is_unseen(self) -> bool:
        """Whether its runs came after all constants and assumptions."""
        return self.data.get("unseen", False)

    @property
    def is_fsdp(self) -> bool:
        return self.key != "nanotron_1b"

    @property
    def runs(self) -> list[Run]:
        defaults = {
            "tp": 1,
            "pp": 1,
            "cp": 1,
            "ep": 1,
            "vp": 1,
            "dp": 0,
            "recompute": "none",
            "lora": False,
            **self.data.get("defaults", {}),
        }
        rows = (dict(zip(self.data["columns"], row, strict=True)) for row in self.data["runs"])
        return [Run(self, {**defaults, **row}) for row in rows]


@cache
def studies() -> tuple[Study, ...]:
    """All of them, by name."""
    return tuple(Study(path.stem, yaml.safe_load(path.read_text())) for path in sorted(FOLDER.glob("*.yaml")))


@cache
def published_model(study_key: str, model: str, lora: bool = False) -> ModelSpec:
    """A model of a study in bfloat16, with what of it is frozen, and the attention function that it has by default."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig

    study = next(own for own in studies() if own.key == study_key)
    config = dict(study.data["models"][model])
    kind = config.pop("model_type")
    if kind == "starcoder2":  # a GPT: two matrices behind attention, layer norms with biases
        heads = config["num_attention_heads"]
        config |= {
            "intermediate_size": 4 * config["hidden_size"],
            "num_key_value_heads": heads,
            "sliding_window": None,
        }
    whole: Any = build_on_meta(AutoConfig.for_model(kind, **config), torch.bfloat16)
    if lora:
        with torch.device("meta"):
            # adapters compute in the dtype of the model, as in the engines of these studies
            whole = get_peft_model(whole, LoraConfig(**study.data["lora"])).to(torch.bfloat16)
    spec = build_model_spec(whole)
    frozen = study.data.get("defaults", {}).get("freeze", {})
    return replace(
        spec, modules={name: own.with_frozen(frozen.get(name, False)) for name, own in spec.modules.items()}
    )


@cache
def model_spec(study_key: str, model: str, lora: bool) -> ModelSpec:
    """See [`Run.spec`]."""
    spec, study = published_model(study_key, model, lora), next(own for own in studies() if own.key == study_key)
    engine, own = study.data["engine"], spec.language_model
    own = replace(
        own,
        attention="eager" if engine.get("attention") == "dense" else own.attention,
        sequence_parallel=engine.get("sequence_parallel", False),
    )
    return replace(spec, modules={**spec.modules, LANGUAGE_MODEL: own})


def costs_of(run: Run, changes: Mapping[str, float] | None = None) -> CostModel:
    """The costs of a run on its machine; `changes` are fields of the device."""
    study = run.study
    device = replace(run.device, **(changes or {}))
    fused = run.values.get("fused")
    engine = (
        study.engine if fused is None else replace(study.engine, fused=fused, sums_in_place=fused, fused_loss=fused)
    )
    kernels = study.data.get("kernels", {})
    engine = replace(
        engine,
        wide_sums=run.values.get("wide_sums", engine.wide_sums),
        attention_share=kernels.get(run.device.name, {}).get(run.values.get("kernel"), engine.attention_share),
    )
    costs = analytic_costs(run.spec, device, 2, engine)
    return costs.in_layout(dict.fromkeys(run.spec.modules, ((), True))) if run.dtype == "float8" else costs


def sizes_of(run: Run, num_samples: int) -> SampleSizes:
    """Samples as long as the run's."""
    tokens = {name: run.seq_len if name == LANGUAGE_MODEL else run.image_tokens for name in run.spec.modules}
    return SampleSizes.uniform(tokens, num_samples)


def published_flops(run: Run) -> float:
    """
    Operations of a step by the definition that publications share (Chowdhery et al., appendix B; equation 7 of
    Korthikanti et al.): all pairs of tokens, those too that causality hides, which our own MFU leaves out; and the
    embeddings or positions where a study counts them as parameters that multiply (`mfu_counts`).
    """
    spec, sizes = run.spec, sizes_of(run, run.batch)
    config = run.study.data["models"][run.model]
    counted = {"positions": run.seq_len, "embeddings": config.get("vocab_size", 0)}
    rows = sum(counted[what] for what in run.study.data.get("mfu_counts", ()))
    found = 6.0 * rows * config.get("hidden_size", 0) * float(sizes.tokens[LANGUAGE_MODEL].sum())
    for name in spec.modules:
        per_token, per_square = training_flops(spec, name)
        pairs = 2 if name == LANGUAGE_MODEL else 1
        found += per_token * float(sizes.tokens[name].sum()) + pairs * per_square * float(sizes.squares[name].sum())
    return found


def ledger(run: Run) -> Ledger:
    """Where the predicted step goes; its sum is that of [`predicted_ms`]."""
    costs, terms = costs_of(run), Counter[str]()
    for again in RECOMPUTED[run.recompute]:
        found = planned(run, costs, again)
        terms.update(ledger_of([found], costs, sync_groups(costs.spec, found.plan)).terms)
    return Ledger({name: terms[name] / len(RECOMPUTED[run.recompute]) for name in TERMS if name in terms})


def predicted_ms(run: Run, changes: Mapping[str, float] | None = None) -> float:
    """Predicted time of a step."""
    costs = costs_of(run, changes)
    answers = [planned(run, costs, again).step_ms for again in RECOMPUTED[run.recompute]]
    return sum(answers) / len(answers)


def predicted_gib(run: Run) -> float:
    """Predicted peak memory of a rank, with weights in float32 where the study's engine keeps frozen ones so."""
    costs = costs_of(run)
    peak = max(planned(run, costs, again).peak_memory_bytes for again in RECOMPUTED[run.recompute])
    frozen = sum(own.num_elements for own in run.spec.parameters.values() if not own.trainable)
    return (peak + 2.0 * frozen / (run.gpus if run.is_sharded else 1)) / 2**30


def planned(run: Run, costs: CostModel, again: bool) -> Prediction:
    """A plan of the run's sizes, as `hf-mmparallel plan` predicts it."""
    # In 16 bits: with float32 copies, the largest runs of engines that divide activations over tp do not fit here.
    settings = {
        "activation_checkpointing": again,
        "zero_stage": 3 if run.is_sharded else int(run.study.has_sharded_optimizer),
        "master_weights": False,
    }
    sizes = ModulePlugin(
        dp_size=run.dp_size,
        tp_size=run.tp,
        pp_size=run.pp,
        cp_size=run.cp,
        ep_size=run.ep,
        vp_size=run.vp if run.vp > 1 else None,
        layers_per_stage=run.study.data.get("layers", {}).get(run.pp),
        **settings,
    )
    first, *others = costs.spec.modules
    plugins = {first: sizes, **{name: ModulePlugin(colocate_with=first, **settings) for name in others}}
    count = -(-run.batch // run.dp_size // run.microbatch)
    schedule = "interleaved" if run.vp > 1 else "1f1b"
    plan = resolve_plan(costs.spec, plugins, schedule=schedule, num_microbatches=count)
    plan = stages_outermost(plan) if run.pp > 1 else plan
    groups = sync_groups(costs.spec, plan)
    planner = StepPlanner(costs, plan, groups, run.microbatch)
    return planner.predict_batch(sizes_of(run, run.batch))


def stages_outermost(plan: ParallelPlan) -> ParallelPlan:
    """The plan of one module with ranks in the order of the other engines: stages vary slowest, then replicas."""
    (module,) = plan.modules.values()
    # virtual stages of a rank share its mesh
    num_stages, first = len({stage.mesh for stage in module.replicas[0]}), module.replicas[0][0]
    grid = len(first.all_ranks)

    def moved(rank: int) -> int:
        replica, stage = divmod(rank // grid, num_stages)
        return (stage * module.dp_size + replica) * grid + rank % grid

    replicas = tuple(
        tuple(replace(stage, mesh=tuple(tuple(map(moved, row)) for row in stage.mesh)) for stage in replica)
        for replica in module.replicas
    )
    return replace(plan, modules={LANGUAGE_MODEL: replace(module, replicas=replicas)})
