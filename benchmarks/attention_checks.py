"""Whether the attention kernels are right on this device: against float64, and the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attention_problems import MASKS, Kernels, Problem, Settings, Shape, error_of
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, encode_words, reference_attention, triton
from hf_mmparallel.kernels.bitfield_attention.mask_plan import compile_mask

# The largest relative error of 16-bit results against float64, whatever plain torch has.
LARGEST_ERROR = 1e-2


def check_cases(settings: Settings) -> Iterator[tuple[str, Problem, dict[str, Any]]]:
    """Every mask at every length, with head dimensions and groups that take turns, then one feature at a time."""
    turn = 0
    for length in settings.check_lengths:
        for name in MASKS:
            head_dim = settings.check_head_dims[turn % len(settings.check_head_dims)]
            kv_heads = (8, 2, 1)[turn % 3] if settings.block is None else (2, 1)[turn % 2]
            heads = 8 if settings.block is None else 2
            shape = Shape(length, heads, kv_heads, head_dim, settings.dtype, settings.device)
            window = max(1, length // 3) if name == "window" else 0
            images, samples = max(4, length // 12), max(16, length // 5)
            yield name, Problem(name, shape, window, images, samples, rotation=1), {}
            turn += 1
    shape = Shape(settings.check_lengths[0], 4, 2, settings.check_head_dims[0], settings.dtype, settings.device)
    for feature in ({"softcap": 20.0}, {"sinks": torch.randn(4, device=settings.device)}, {"scale": 0.3}):
        yield f"packed, {next(iter(feature))}", Problem("packed", shape, 0, 8, 40, rotation=1), feature
    yield "holes", _with_words(Problem("full", shape, rotation=1), _holes(shape.length)), {}
    yield "permuted rows", _permuted(Problem("packed", shape, 0, 8, 40, rotation=1)), {}


def _holes(length: int) -> Tensor:
    """Words whose queries do not see every second run of keys: no interval."""
    kinds = 1 + torch.arange(length)[None] // 5 % 2
    return encode_words(torch.ones(1, length, dtype=torch.int64), kinds=kinds, sees=1)


def _with_words(problem: Problem, words: Tensor) -> Problem:
    problem.mask = BitfieldMask.from_words(words.to(problem.shape.device))
    return problem


def _permuted(problem: Problem) -> Problem:
    """The rows in any order, as they lie on a rank."""
    mask, length = problem.mask, problem.shape.length
    rows, keys = (torch.randperm(length, device=problem.shape.device) for _ in range(2))
    problem.mask = BitfieldMask(
        mask.query_words[:, rows], mask.query_positions[:, rows], mask.key_words[:, keys], mask.key_positions[:, keys]
    )
    return problem


def correctness(settings: Settings) -> list[dict[str, Any]]:
    """The kernels against float64; at most 1.5 times the error of the plain definition in the same dtype."""
    rows = []
    for name, problem, feature in check_cases(settings):
        right = _by_definition([x.double() for x in problem.inputs[0]], problem, feature)
        plain = map(error_of, _by_definition(problem.inputs[0], problem, feature), right)
        allowed = [min(LARGEST_ERROR, 1.5 * error + 1e-6) for error in plain]
        for tiles, got in _by_kernels(settings, problem, feature):
            errors = [error_of(tensor, want) for tensor, want in zip(got, right, strict=False)]
            ok = all(error <= limit for error, limit in zip(errors, allowed, strict=False))
            shape = problem.shape
            label = f"{name} T{shape.length} D{shape.head_dim} H{shape.heads}:{shape.kv_heads} {tiles}"
            rows.append({"name": label, "errors": errors, "allowed": allowed, "ok": ok})
            worst = max(error / limit for error, limit in zip(errors, allowed, strict=False))
            print(f"  {label:60} error {worst:6.2f} of what is allowed  {'ok' if ok else 'WRONG'}", flush=True)
    return rows


def _by_kernels(settings: Settings, problem: Problem, feature: dict[str, Any]) -> Iterator[tuple[str, list[Tensor]]]:
    """Output, log-sum-exp and gradients; output and log-sum-exp of tiles that are cut, too."""
    query, key, value, grad = problem.inputs[0]
    options = (feature.get("scale"), feature.get("softcap", 0.0), feature.get("sinks"))
    tuning = settings.tuning(problem.shape.head_dim)
    # How many programs run at once decides which tiles are cut.
    blocks = (problem.mask, problem.window, tuning.block_q, tuning.block_k)
    whole, cut = (compile_mask(*blocks, num_programs=number) for number in (1, 2**20))
    tuning = settings.tuning(problem.shape.head_dim, whole.interval)
    out, lse = triton.forward(query, key, value, whole, *options, tuning=tuning)
    grads = triton.backward(grad, query, key, value, out, lse, whole, *options, tuning=tuning)
    yield "whole", [out, lse, *(tensor for tensor in grads if tensor is not None)]
    if cut.split is not None:
        yield "cut", list(triton.forward(query, key, value, cut, *options, tuning=tuning))


def _by_definition(tensors: Sequence[Tensor], problem: Problem, feature: dict[str, Any]) -> list[Tensor]:
    """Output, log-sum-exp and gradients by the definition, in the dtype of the tensors."""
    *inputs, grad = tensors
    sinks = feature.get("sinks")
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    if sinks is not None:
        inputs.append(sinks.detach().clone().requires_grad_())
    out, lse = reference_attention(
        *inputs[:3],
        problem.mask,
        feature.get("scale"),
        feature.get("softcap", 0.0),
        problem.window,
        inputs[3] if sinks is not None else None,
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad)]


def races(settings: Settings) -> list[dict[str, Any]]:
    """The same bits each time, while other memory traffic moves what the cache holds."""
    rows = []
    noise = torch.randn(2**24 if settings.block is None else 2**10, device=settings.device)
    for head_dim in settings.head_dims:
        problem = settings.problem("packed", settings.lengths[0], head_dim, rotation=1)
        kernels = Kernels(problem, settings.tuning(head_dim))
        first = [*kernels.forward(0), *kernels.backward(0)]
        different = 0
        for _ in range(settings.repeats):
            noise[: int(torch.randint(1, len(noise), ()))].mul_(1.0001)
            again = [*kernels.forward(0), *kernels.backward(0)]
            different += not all(map(torch.equal, again, first))
        row = {"name": f"D{head_dim}", "repeats": settings.repeats, "different": different}
        rows.append({**row, "ok": different == 0})
        print(f"  {rows[-1]}", flush=True)
    return rows
