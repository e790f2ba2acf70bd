"""Problems of the attention benchmark on a device: sizes, masks, inputs, kernels, their peers, and timing."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, encode_words, triton
from hf_mmparallel.kernels.bitfield_attention.mask_plan import MaskPlan, compile_mask
from hf_mmparallel.kernels.bitfield_attention.tuning import Tile, Tuning, choose_tuning

IMAGE_TOKENS = 576
MASKS = ("full", "causal", "embedded", "packed", "window")


def mask_words(name: str, length: int, image_tokens: int = IMAGE_TOKENS, sample_tokens: int = 1024) -> Tensor:
    """
    Words `[1, length]` on the CPU.

    Args:
        name (`str`): `"full"`, `"causal"`, `"window"` (causal; the window is the layer's), `"embedded"` (one sample of
            text and images that see each other both ways) or `"packed"` (such samples in a row, and padding).
        length (`int`): Tokens.
        image_tokens (`int`, *optional*, defaults to 576): Of an image.
        sample_tokens (`int`, *optional*, defaults to 1024): Of a packed sample, on average.

    Returns:
        `torch.Tensor`: int64 words.
    """
    generator = torch.Generator().manual_seed(length)
    one = torch.ones(1, length, dtype=torch.int64)
    if name in ("causal", "window"):
        return encode_words(one)
    if name == "full":
        return encode_words(one, causal=False, sees_all=True)
    segment, span = (one, one - 1) if name == "embedded" else (one - 1, one - 1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    if name == "embedded":
        place, image = draw(1, image_tokens), 0
        while place < length:
            image += 1
            span[:, place : place + image_tokens] = image
            place += image_tokens + draw(image_tokens // 4, image_tokens)
        return encode_words(segment, span)
    start, sample, end = 0, 0, length - sample_tokens // 8
    while start < end:
        sample += 1
        stop = min(end, start + draw(sample_tokens // 2, 3 * sample_tokens // 2))
        segment[:, start:stop] = sample
        image = start + (stop - start) // 4
        span[:, image : image + (stop - start) // 3] = 1
        start = stop
    return encode_words(segment, span)


@dataclass(frozen=True)
class Shape:
    """
    Sizes of a problem.

    Args:
        length (`int`): Queries and keys.
        heads (`int`): Query heads.
        kv_heads (`int`): Heads of keys and values.
        head_dim (`int`): Head dimension.
        dtype (`torch.dtype`): Of the inputs.
        device (`str`): Where they are.
    """

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str


class Problem:
    """
    A mask, three sets of inputs that take turns, and the gradients of the outputs.

    Args:
        name (`str`): One of `MASKS`.
        shape (`Shape`): Sizes.
        window (`int`, *optional*, defaults to 0): Tokens of the sliding window; 0 for none.
        image_tokens (`int`, *optional*, defaults to 576): Of an image.
        sample_tokens (`int`, *optional*, defaults to 1024): Of a packed sample.
        rotation (`int`, *optional*, defaults to 3): Sets of inputs.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        window: int = 0,
        image_tokens: int = IMAGE_TOKENS,
        sample_tokens: int = 1024,
        rotation: int = 3,
    ):
        self.name, self.shape, self.window = name, shape, window
        words = mask_words(name, shape.length, image_tokens, sample_tokens)
        self.mask = BitfieldMask.from_words(words.to(shape.device))
        self.inputs = [self._draw() for _ in range(rotation)]
        self._turn = itertools.cycle(range(rotation))
        self._plans: dict[tuple[int, int], MaskPlan] = {}

    def _draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and the gradient of the output."""
        shape = self.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        sizes = [(1, count, shape.length, shape.head_dim) for count in heads]
        query, key, value, grad = (torch.randn(size, dtype=shape.dtype, device=shape.device) for size in sizes)
        return query, key, value, grad

    def turn(self) -> int:
        """The next set of inputs."""
        return next(self._turn)

    def plan(self, block_q: int, block_k: int) -> MaskPlan:
        """The mask compiled for these blocks, once."""
        if (block_q, block_k) not in self._plans:
            plan = compile_mask(self.mask, self.window, block_q, block_k, num_heads=self.shape.heads)
            self._plans[block_q, block_k] = plan
        return self._plans[block_q, block_k]

    @cached_property
    def intervals(self) -> Tensor:
        """First key and number of keys of each query: int32 `[2, length]`."""
        plan = self.plan(128, 128)
        assert plan.interval
        return plan.query_rows[0]

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return int(self.intervals[1].to(torch.int64).sum())

    def visited_pairs(self, tuning: Tuning) -> int:
        """Pairs of the blocks that the forward kernel visits."""
        tiles = self.plan(tuning.block_q, tuning.block_k).by_query.tiles
        return int((tiles[:, 4] - tiles[:, 2]).sum()) * tuning.block_q * tuning.block_k

    def tflops(self, time_ms: float, backward: bool = False, pairs: int | None = None) -> float:
        """10^12 operations a second: 4 * D for each visible pair and head, 2.5 times that backward."""
        pairs = self.visible_pairs if pairs is None else pairs
        operations = 4 * pairs * self.shape.head_dim * self.shape.heads * (2.5 if backward else 1.0)
        return operations / (time_ms * 1e9)


class Kernels:
    """
    The kernels on a problem.

    Args:
        problem (`Problem`): The mask and the inputs.
        tuning (`Tuning`): The tiles.
    """

    def __init__(self, problem: Problem, tuning: Tuning):
        self.problem, self.tuning = problem, tuning
        self.plan = problem.plan(tuning.block_q, tuning.block_k)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, index: int) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a set of inputs."""
        return triton.forward(*self.problem.inputs[index][:3], self.plan, tuning=self.tuning)

    def backward(self, index: int) -> tuple[Tensor, ...]:
        """Gradients of query, key and value; the forward pass runs once for each set."""
        if index not in self._saved:
            self._saved[index] = self.forward(index)
        query, key, value, grad = self.problem.inputs[index]
        return triton.backward(grad, query, key, value, *self._saved[index], self.plan, tuning=self.tuning)[:3]


class Peer:
    """
    Another attention on a problem, through autograd.

    Args:
        problem (`Problem`): The mask and the inputs.
        attend (`Callable`): Takes query, key and value, returns the output.
    """

    def __init__(self, problem: Problem, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        self.problem, self.attend = problem, attend
        self._saved: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def forward(self, index: int) -> tuple[Tensor]:
        """Output of a set of inputs."""
        with torch.no_grad():
            return (self.attend(*self.problem.inputs[index][:3]),)

    def backward(self, index: int) -> tuple[Tensor, ...]:
        """Gradients of query, key and value; the forward pass runs once for each set."""
        if index not in self._saved:
            inputs = [tensor.detach().requires_grad_() for tensor in self.problem.inputs[index][:3]]
            self._saved[index] = (self.attend(*inputs), inputs)
        out, inputs = self._saved[index]
        return torch.autograd.grad(out, inputs, self.problem.inputs[index][3], retain_graph=True)


def flex_peer(problem: Problem, compiled: bool) -> tuple[Peer, Callable[[], Any]]:
    """FlexAttention with a block mask that was built before, and what builds it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if compiled:
        torch._dynamo.reset()  # each mask is a new program; after a few it would run uncompiled
    mask_mod = flex_rule(problem)
    length, device = problem.shape.length, problem.shape.device

    def build() -> Any:
        return create_block_mask(mask_mod, 1, None, length, length, device=device, _compile=compiled)

    block_mask = build()
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    gqa = problem.shape.heads != problem.shape.kv_heads
    return Peer(problem, lambda q, k, v: attend(q, k, v, block_mask=block_mask, enable_gqa=gqa)), build


def flex_rule(problem: Problem) -> Callable[..., Tensor]:
    """The mask as FlexAttention says it most cheaply: by positions alone where they do, else by intervals."""
    window = problem.window
    if problem.name == "full":
        return lambda b, h, q, k: q >= 0
    if problem.name == "causal":
        return lambda b, h, q, k: q >= k
    if problem.name == "window":
        return lambda b, h, q, k: (q >= k) & (k > q - window)
    first, count = problem.intervals.unbind(0)
    stop = first + count
    return lambda b, h, q, k: (k >= first[q]) & (k < stop[q])


def sdpa_peer(problem: Problem, backend: str) -> Peer:
    """One backend of torch's attention; only for full and causal masks."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    causal, gqa = problem.name == "causal", problem.shape.heads != problem.shape.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=gqa
            )

    return Peer(problem, attend)


def time_ms(function: Callable[[], Any], quick: bool = False) -> float:
    """Median of a call after a warm-up; on a GPU with its cache cleared before each call."""
    if torch.cuda.is_available() and not quick:
        from triton.testing import do_bench

        return float(do_bench(function, warmup=50, rep=200, return_mode="median"))
    times = []
    for _ in range(2):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


@dataclass(frozen=True)
class Settings:
    """
    Sizes of the benchmark; those of the dry run are small.

    Args:
        device (`str`): `"cuda"` or `"cpu"`.
        dtype (`torch.dtype`): Of the inputs; float16 in the dry run: the interpreter's bfloat16 products are wrong.
        lengths (`tuple[int, ...]`): Of the speed section.
        check_lengths (`tuple[int, ...]`): Of the correctness section.
        check_head_dims (`tuple[int, ...]`): Of the correctness section.
        heads (`int`): Query heads.
        kv_heads (`int`): Heads of keys and values.
        head_dims (`tuple[int, ...]`): Of the speed section.
        window (`int`): Tokens of the sliding window.
        image_tokens (`int`): Of an image.
        sample_tokens (`int`): Of a packed sample.
        repeats (`int`): Of the races section.
        ceiling (`int`): Side of the square matrices, whose product is the ceiling.
        block (`int`, *optional*): Blocks and tiles of all kernels; those of the table when left out.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = (8192, 16384, 32768, 65536)
    check_lengths: tuple[int, ...] = (128, 384, 1000, 4096)
    check_head_dims: tuple[int, ...] = (64, 96, 128, 256)
    heads: int = 32
    kv_heads: int = 8
    head_dims: tuple[int, ...] = (128,)
    window: int = 4096
    image_tokens: int = 576
    sample_tokens: int = 1024
    repeats: int = 200
    ceiling: int = 8192
    block: int | None = None

    def tuning(self, head_dim: int, interval: bool = True) -> Tuning:
        """The tiles of the kernels."""
        if self.block is not None:
            tile = Tile(self.block, self.block, num_warps=4, num_stages=1)
            return Tuning(self.block, self.block, tile, tile, tile)
        return choose_tuning(torch.cuda.get_device_capability(), head_dim, interval)

    def problem(self, name: str, length: int, head_dim: int, rotation: int = 3) -> Problem:
        """A problem of the speed section."""
        shape = Shape(length, self.heads, self.kv_heads, head_dim, self.dtype, self.device)
        window = self.window if name == "window" else 0
        return Problem(name, shape, window, self.image_tokens, self.sample_tokens, rotation)


TINY = Settings(
    device="cpu",
    dtype=torch.float16,
    lengths=(128,),
    check_lengths=(64, 50),
    check_head_dims=(64,),
    heads=2,
    kv_heads=1,
    head_dims=(64,),
    window=20,
    image_tokens=12,
    sample_tokens=40,
    repeats=2,
    ceiling=64,
    block=32,
)


def error_of(got: Tensor, want: Tensor) -> float:
    """`|got - want| / |want|` over finite values; infinite if the finite positions differ, or a value is NaN."""
    finite = torch.isfinite(want)
    if bool(got.isnan().any()) or not torch.equal(torch.isfinite(got), finite):
        return float("inf")
    got, want = got.double()[finite], want.double()[finite]
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
