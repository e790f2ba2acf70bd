"""The plans whose memory `memory_error.py` measures: those with names, and those drawn at random by a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Literal

import memory_models

VISION, AUDIO, LM = "vision", "audio", "language_model"
LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
BF16, PACKED = {"bf16": True}, {"packing": True}


@dataclass(frozen=True)
class Case:
    """
    A plan and what trains under it.

    Args:
        name (`str`): What it is.
        world_size (`int`): Ranks.
        modules (`dict`): Settings of each module.
        family (`str`, *optional*, defaults to `"llava"`): The model.
        schedule (`str`, *optional*, defaults to `"1f1b"`): The schedule.
        microbatch (`int`, *optional*, defaults to 2): Samples of a microbatch.
        num_microbatches (`int`, *optional*, defaults to 4): Microbatches of a copy of the language model.
        arguments (`dict`, *optional*): More arguments of the Trainer, such as `packing` and `bf16`.
        dtype (`str`, *optional*, defaults to `"float32"`): Of the weights.
        lengths (`str`, *optional*, defaults to `"even"`):
            Of samples: all the same, from 20 to 200 tokens of text, or from 16 to 512 of which most are short.
        heads (`tuple[int, int]`, *optional*, defaults to `(4, 2)`):
            Attention heads of the language model, and those of its keys and values.
    """

    name: str
    world_size: int
    modules: dict[str, dict[str, Any]]
    family: str = "llava"
    schedule: str = "1f1b"
    microbatch: int = 2
    num_microbatches: int = 4
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    lengths: Literal["even", "uneven", "wide"] = "even"
    heads: tuple[int, int] = (4, 2)


_TP2 = {LM: {"tp_size": 2}}
_PP2 = {LM: {"pp_size": 2}}
_AGAIN = {name: {"activation_checkpointing": True} for name in (VISION, LM)}
CASES = (
    Case("two ranks", 2, {}),
    Case("two ranks, GPipe", 2, {}, schedule="gpipe"),
    Case("two ranks, eager", 2, {}, schedule="eager", num_microbatches=6),
    Case("frozen tower", 2, {VISION: {"freeze": "tower"}}),
    Case("only the projector", 2, {VISION: {"freeze": "tower"}, LM: {"freeze": True}}),
    Case("frozen tower, LoRA", 2, {VISION: {"freeze": "tower"}, LM: {"peft_config": LORA}}),
    Case("checkpointing", 2, _AGAIN),
    Case("bf16 autocast", 2, {}, arguments=BF16),
    Case("bf16 weights", 2, {}, dtype="bfloat16"),
    Case("eager attention", 2, {name: {"attn_implementation": "eager"} for name in (VISION, LM)}),
    Case("packed, uneven samples", 2, {}, arguments=PACKED, lengths="uneven"),
    Case("padded, uneven samples", 2, {}, lengths="uneven"),
    Case("shared ranks, dp 2", 2, {VISION: {"dp_size": 2}, LM: {"colocate_with": VISION}}),
    Case("LM tp 2", 3, _TP2),
    Case("LM pp 2, GPipe", 3, _PP2, schedule="gpipe"),
    Case("LM cp 2", 3, {LM: {"cp_size": 2}}, lengths="uneven"),
    Case("gemma3 (tied), LM pp 2", 3, _PP2, "gemma3"),
    Case("qwen2.5-vl (tied), LM pp 2", 3, _PP2, "qwen2_5_vl"),
    Case("CLIP, Whisper, Qwen3", 3, {}, "composed"),
    Case("vision dp 2, LM dp 2", 4, {VISION: {"dp_size": 2}, LM: {"dp_size": 2}}),
    Case("vision pp 2, LM pp 2, bf16 autocast", 4, {VISION: {"pp_size": 2}, **_PP2}, arguments=BF16),
    Case("vision dp 2, frozen LM tp 2", 4, {VISION: {"dp_size": 2}, LM: {"tp_size": 2, "freeze": True}}),
)

_LORA = {VISION: {"freeze": "tower"}, LM: {"peft_config": LORA}}
_COPIES = {VISION: {"dp_size": 2}, LM: {"dp_size": 2}}
_FROZEN_TP2 = {VISION: {"freeze": "tower"}, LM: {"tp_size": 2, "freeze": True}}
_TWO, _EIGHT, _ONE_FOR_ALL = (8, 4), (16, 2), (8, 1)


def _wide(name: str, world_size: int, modules: dict, *args: Any, heads: tuple[int, int], **more: Any) -> Case:
    """A plan with grouped keys and samples of many lengths."""
    return Case(f"{name}, {heads[0]}:{heads[1]}", world_size, modules, *args, lengths="wide", heads=heads, **more)


PADDED_ROWS = (
    _wide("padded", 2, {}, heads=_TWO),
    _wide("padded", 2, {}, heads=_EIGHT),
    _wide("padded, one head of keys", 2, {}, heads=_ONE_FOR_ALL),
    _wide("padded, accumulation", 2, {}, microbatch=1, num_microbatches=8, heads=_EIGHT),
    _wide("padded, checkpointing", 2, _AGAIN, microbatch=3, heads=_EIGHT),
    _wide("padded, LoRA, frozen tower", 2, _LORA, heads=_EIGHT),
    _wide("padded, bf16 weights", 2, {}, dtype="bfloat16", heads=_EIGHT),
    _wide("padded, bf16 autocast", 2, {}, arguments=BF16, heads=_TWO),
    _wide("padded, eager attention", 2, {LM: {"attn_implementation": "eager"}}, heads=_TWO),
    _wide(
        "padded, bitfield", 2, {LM: {"attn_implementation": "bitfield"}}, arguments={"packing": False}, heads=_EIGHT
    ),
    _wide("padded, windows (Mistral)", 2, {}, "mistral", heads=_EIGHT),
    Case("padded, windows (Mistral), even samples, 16:2", 2, {}, "mistral", heads=_EIGHT),
    _wide("padded, tp 2", 3, _TP2, heads=_TWO),
    _wide("padded, tp 2", 3, _TP2, heads=_EIGHT),
    _wide("padded, frozen tp 2", 3, _FROZEN_TP2, heads=_TWO),
    _wide("padded, pp 2, GPipe", 3, _PP2, schedule="gpipe", heads=_EIGHT),
    _wide("padded, windows (Gemma3), pp 2", 3, _PP2, "gemma3", heads=_TWO),
    _wide("padded, CLIP, Whisper, Qwen3", 3, {}, "composed", heads=_EIGHT),
    _wide("padded, dp 2, bf16 autocast", 4, _COPIES, arguments=BF16, heads=_EIGHT),
    _wide("padded, tp 2, pp 2", 5, {LM: {"tp_size": 2, "pp_size": 2}}, heads=_TWO),
)
PACKED_ROWS = tuple(
    _wide(f"packed{name}", world_size, modules, *args, arguments={**PACKED, **arguments}, heads=heads, **more)
    for name, world_size, modules, args, arguments, heads, more in (
        ("", 2, {}, (), {}, _TWO, {}),
        ("", 2, {}, (), {}, _EIGHT, {}),
        (", one head of keys", 2, {}, (), {}, _ONE_FOR_ALL, {}),
        (", accumulation", 2, {}, (), {}, _EIGHT, {"microbatch": 1, "num_microbatches": 8}),
        (", checkpointing", 2, _AGAIN, (), {}, _EIGHT, {"microbatch": 3}),
        (", LoRA, frozen tower", 2, _LORA, (), {}, _EIGHT, {}),
        (", bf16 weights", 2, {}, (), {}, _EIGHT, {"dtype": "bfloat16"}),
        (", bf16 autocast", 2, {}, (), BF16, _TWO, {}),
        (", windows (Mistral)", 2, {}, ("mistral",), {}, _EIGHT, {}),
        (", cp 2", 3, {LM: {"cp_size": 2}}, (), {}, _EIGHT, {}),
        (", tp 2", 3, _TP2, (), {}, _TWO, {}),
        (", frozen tp 2", 3, _FROZEN_TP2, (), {}, _EIGHT, {}),
        (", pp 2, GPipe", 3, _PP2, (), {}, _EIGHT, {"schedule": "gpipe"}),
        (", windows (Gemma3), pp 2", 3, _PP2, ("gemma3",), {}, _TWO, {}),
        (", Qwen2.5-VL, pp 2", 3, _PP2, ("qwen2_5_vl",), {}, _TWO, {}),
        (", CLIP, Whisper, Qwen3", 3, {}, ("composed",), {}, _EIGHT, {}),
        (", dp 2, bf16 autocast", 4, _COPIES, (), BF16, _EIGHT, {}),
        (", cp 2, dp 2", 5, {LM: {"cp_size": 2, "dp_size": 2}}, (), {}, _TWO, {}),
        (", cp 2, tp 2", 5, {LM: {"cp_size": 2, "tp_size": 2}}, (), {}, _EIGHT, {}),
        (", tp 2, pp 2", 5, {LM: {"tp_size": 2, "pp_size": 2}}, (), {}, _TWO, {}),
    )
)
_BESIDE = {"colocate_with": LM}
_HALVES = {VISION: {"cp_size": 2, **_BESIDE}, LM: {"dp_size": 2}}
_SPREAD = {VISION: {"dp_size": 2, **_BESIDE}, LM: {"dp_size": 2, "ep_size": 2}}
SHARED_RANKS = (
    Case("shared, vision cp 2, LM dp 2", 2, _HALVES, lengths="uneven"),
    Case("shared, vision cp 2, LM dp 2, Qwen2.5-VL", 2, _HALVES, "qwen2_5_vl", lengths="uneven"),
    Case("shared, vision cp 2, LM pp 2", 2, {VISION: {"cp_size": 2, **_BESIDE}, **_PP2}),
    Case("shared, vision tp 2, LM pp 2", 2, {VISION: {"tp_size": 2, **_BESIDE}, **_PP2}),
    Case("shared, vision dp 2, LM dp 2 ep 2", 2, _SPREAD, "mixtral"),
    Case("shared, vision dp 2, LM tp 2 ep 2", 2, {**_SPREAD, LM: {"tp_size": 2, "ep_size": 2}}, "mixtral"),
    Case("shared, vision dp 3, LM pp 3", 3, {VISION: {"dp_size": 3, **_BESIDE}, LM: {"pp_size": 3}}),
    Case(
        "shared, vision tp 4, LM cp 2 pp 2",
        4,
        {VISION: {"tp_size": 4, **_BESIDE}, LM: {"cp_size": 2, "pp_size": 2}},
        lengths="uneven",
    ),
    Case(
        "shared, vision pp 2 cp 2, LM dp 4 ep 2, ZeRO-1",
        4,
        {VISION: {"pp_size": 2, "cp_size": 2, **_BESIDE}, LM: {"dp_size": 4, "ep_size": 2, "zero_stage": 1}},
        "mixtral",
    ),
    Case(
        "shared, vision dp 4, LM dp 2 pp 2 ep 2, checkpointing",
        4,
        {VISION: {"dp_size": 4, **_BESIDE}, LM: {"dp_size": 2, "pp_size": 2, "ep_size": 2, **_AGAIN[LM]}},
        "mixtral",
    ),
)
GROUPS = {"named": CASES, "padded": PADDED_ROWS, "packed": PACKED_ROWS, "shared": SHARED_RANKS}
NAMED = tuple(case for cases in GROUPS.values() for case in cases)
_LAYOUTS = ({}, {"pp_size": 2}, {"tp_size": 2}, {"dp_size": 2})


def random_cases(count: int, seed: int) -> list[Case]:
    """Random combinations of the properties of the named plans."""
    rng = random.Random(seed)
    cases = []
    while len(cases) < count:
        case = _drawn(f"random {seed}.{len(cases)}", rng)
        if case is not None:
            cases.append(case)
    return cases


def _drawn(name: str, rng: random.Random) -> Case | None:
    """A plan, or `None` where it takes too many ranks or the model can't be cut as drawn."""
    # no drawn plan shares experts
    family = rng.choice([*(name for name in memory_models.FAMILIES if name != "mixtral"), "llava"])
    modules: dict[str, dict[str, Any]] = {
        part: dict(rng.choice(_LAYOUTS)) if rng.random() < 0.4 else {} for part in memory_models.FAMILIES[family].media
    }
    modules[LM] = dict(rng.choice([*_LAYOUTS, {"cp_size": 2}, {"tp_size": 2, "pp_size": 2}]))
    for part, settings in modules.items():
        if rng.random() < 0.3:
            settings["freeze"] = True if part == LM else "tower"
        elif rng.random() < 0.2 and part == LM:
            settings["peft_config"] = LORA
        if rng.random() < 0.25:
            settings["activation_checkpointing"] = True
    sizes = ("pp_size", "tp_size", "cp_size", "dp_size")
    world_size = sum(math.prod(settings.get(size, 1) for size in sizes) for settings in modules.values())
    arguments = {**rng.choice([{}, {}, BF16]), **rng.choice([{}, PACKED])}
    heads = rng.choice([_TWO, _TWO, _EIGHT, _EIGHT, _ONE_FOR_ALL, (8, 8)])
    case = Case(
        name,
        world_size,
        modules,
        family,
        rng.choice(["1f1b", "1f1b", "gpipe", "eager"]),
        rng.choice([1, 2, 3]),
        rng.choice([2, 4]),
        arguments,
        rng.choice(["float32", "float32", "bfloat16"]) if "bf16" not in arguments else "float32",
        rng.choice(["even", "uneven", "wide", "wide"]),
        heads,
    )
    cannot_cut = family == "qwen2_5_vl" and "tp_size" in modules[VISION]
    cannot_cut |= "tp_size" in modules[LM] and heads == _ONE_FOR_ALL
    return None if cannot_cut or world_size > 5 else case
