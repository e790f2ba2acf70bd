"""Measures the layers of a model on this machine, one at a time, so that only one of them needs memory."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._device import Clock
from ..cost import layer_flops, module_flops
from ..cost.profile import LayerProfile, MeasuredLayer, MeasuredPoint, shape_digest, window_of
from ..modeling.tp_collectives import split_rows
from ..modeling.unowned import hidden_of
from .layer_runs import Forward, Inputs, ModuleRuns, Skeleton, profile_clock

BEFORE, AFTER = "before", "after"
LENGTHS = (64, 256, 1024, 4096, 16384)
_PROBE_TOKENS = 64
_MASKED = -1e4  # values of a float mask below this mean that a key is not visible


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of a measurement."""

    tp_sizes: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = LENGTHS  # tokens per chunk
    modules: tuple[str, ...] | None = None  # to measure; all when left out
    dtype: torch.dtype | None = None  # of the weights; that of the model's config when left out
    autocast: torch.dtype | None = None  # of matrix multiplications
    device: str = "cpu"  # `"cpu"` or `"cuda"`
    attention: str | None = None  # attention function; the model's default when left out
    budget_s: float = 0.5  # for the repetitions of one chunk
    # All chunks of a layer are timed in turn, in this many rounds, and the fastest round counts, so that other load on
    # the machine does not slow down a single chunk only.
    num_rounds: int = 5
    # Chunks whose forward and backward would take longer are left out; those whose rounds together would take longer
    # get two rounds.
    limit_s: float = 10.0

    def chunks(self) -> list[tuple[int, int]]:
        """(tokens, sequences) of each chunk: one sequence, and several short ones to separate the quadratic term."""
        lengths = sorted(set(self.lengths))
        short = lengths[1 if len(lengths) > 2 else 0]
        several = [(length, length // short) for length in lengths if length // short > 1]
        return sorted([*((length, 1) for length in lengths), *several])


def profile_layers(
    source: Any,  # the model, as in `build_on_meta`
    settings: ProfileSettings,
    clock: Clock | None = None,  # that of the device when left out
    report: Callable[[str], None] = lambda text: None,  # called with a description of each measurement
) -> LayerProfile:
    """
    Measures every kind of layer of a model: forward, input gradient, weight gradients and saved activation bytes.

    No weights are read. Raises `ValueError` if a module is unknown, or nothing of the model can be measured.
    """
    device = torch.device(settings.device)
    clock = clock or profile_clock(device)
    layers: list[MeasuredLayer] = []
    left_out: list[str] = []
    dtype, attention = "", ""
    for tp_size in settings.tp_sizes:
        skeleton = Skeleton.of(source, device, settings.dtype, settings.attention)
        names = list(skeleton.spec.modules if settings.modules is None else settings.modules)
        unknown = next((name for name in names if name not in skeleton.spec.modules), None)
        if unknown is not None:
            raise ValueError(f"The model has no module `{unknown}`. Its modules are {list(skeleton.spec.modules)}.")
        attention = skeleton.attention
        with _fake_mesh(tp_size, device.type) as mesh:
            for module in names:
                runs = ModuleRuns(skeleton, module, clock, settings.autocast)
                dtype = str(runs.stage.input_dtype).removeprefix("torch.")
                profiler = _Profiler(runs, settings, tp_size, mesh, report, left_out)
                try:
                    layers += profiler.layers()
                except Exception as error:  # a model may raise anything; go on with the other modules
                    left_out.append(f"`{module}` with tp {tp_size}: {' '.join(str(error).split())}")
    name = source if isinstance(source, str) else type(source).__name__
    if not layers:
        raise ValueError(f"Nothing of `{name}` can be measured: {'; '.join(left_out)}")
    autocast = None if settings.autocast is None else str(settings.autocast).removeprefix("torch.")
    return LayerProfile(
        model=name,
        device=device_name(device),
        dtype=dtype,
        autocast=autocast,
        attention=attention,
        versions={package: version(package) for package in ("torch", "transformers")},
        layers=tuple(layers),
        left_out=tuple(left_out),
    )


def device_name(device: torch.device) -> str:
    """Name of a device; for a CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{_processor()}, {count} thread{'' if count == 1 else 's'}"


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def _fake_mesh(tp_size: int, device_type: str) -> Iterator[Any]:
    """A mesh over torch's fake process group, with this process as rank 0: collectives send nothing."""
    if tp_size == 1:
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError(
            "`tp_sizes` above 1 can't be measured in a process with a process group. Measure in a new process."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp_size)
    try:
        yield init_device_mesh(device_type, (tp_size,))
    finally:
        dist.destroy_process_group()


@dataclass
class _Profiler:
    """Measures one module for one tensor-parallel size."""

    runs: ModuleRuns
    settings: ProfileSettings
    tp_size: int
    mesh: Any
    report: Callable[[str], None]
    left_out: list[str]

    def layers(self) -> list[MeasuredLayer]:
        """Measures all kinds of layers of the module, and the computation before and after the layers."""
        if not self.runs.spec.is_chain:
            return self.shares_of_whole()
        kinds = [(BEFORE, (-1,)), *layer_kinds(self.runs), (AFTER, (self.runs.spec.num_layers,))]
        return [self.measured(kind, indices, self.points(kind, indices[:1])) for kind, indices in kinds]

    def shares_of_whole(self) -> list[MeasuredLayer]:
        """Measures blocks that are no chain together, and divides what they take as their counted operations."""
        name, spec = self.runs.name, self.runs.skeleton.spec
        indices = range(-1, self.runs.spec.num_layers + 1)
        points, whole = self.points("blocks", indices), module_flops(spec, name)[0]
        shares = {index: layer_flops(spec, name, index)[0] / whole for index in indices}
        return [
            self.measured("blocks", (index,), [point.times(share) for point in points])
            for index, share in shares.items()
        ]

    def measured(self, kind: str, indices: tuple[int, ...], points: Sequence[MeasuredPoint]) -> MeasuredLayer:
        """Layers of a kind with these measurements."""
        name, spec = self.runs.name, self.runs.skeleton.spec
        digest, window = shape_digest(spec, name, indices[0]), window_of(spec, name, indices[0])
        return MeasuredLayer(name, kind, indices, digest, self.tp_size, tuple(points), window)

    def points(self, kind: str, indices: Sequence[int]) -> list[MeasuredPoint]:
        """The measurements of a layer, or of several together, by chunk size, as far as time and memory allow."""
        label = f"{self.runs.name} {kind}, tp {self.tp_size}"
        with self.runs.skeleton.real(self.runs.name, indices, self.mesh) as layer:
            part = _Part(self.runs, layer, indices)
            chunks = self.chunks(part, label)
            for number in range(2, self.settings.num_rounds + 1):
                for chunk in chunks:
                    if number > 2 and 2 * number * chunk.seconds > self.settings.limit_s:
                        continue  # long chunks vary little
                    self.report(f"{label}: {chunk.tokens} tokens, round {number} of {self.settings.num_rounds}")
                    part.time(chunk, self.settings.budget_s / self.settings.num_rounds)
            part.forget()
        return [chunk.point for chunk in chunks]

    def chunks(self, part: _Part, label: str) -> list[Chunk]:
        """The chunks that time and memory allow, each timed in a first round."""
        result: dict[tuple[int, int], Chunk] = {}
        for tokens, sequences in self.settings.chunks():
            last = next(reversed(result.values()), None)
            if last is not None and last.seconds * tokens / last.tokens > self.settings.limit_s:
                self.left_out.append(f"{label}: {tokens} tokens would take over {self.settings.limit_s:g} s")
                break
            self.report(f"{label}: {tokens} tokens")
            inputs = self.runs.inputs(tokens, sequences)
            key = (inputs.tokens, inputs.sequences)
            if key in result:  # an encoder with items of fixed size
                continue
            try:
                chunk = part.chunk(inputs)
                part.time(chunk, self.settings.budget_s / self.settings.num_rounds)
            except torch.OutOfMemoryError:
                self.left_out.append(f"{label}: {tokens} tokens do not fit in memory")
                break
            result[key] = chunk
        if not result:
            raise ValueError(f"no chunk fits in memory ({label}). Use shorter `--lengths`")
        return list(result.values())


@dataclass
class Chunk:
    """A chunk of one part, with its measurements."""

    tokens: int
    sequences: int
    run: Callable[[], Forward]  # runs one forward of the part
    saved_bytes: dict[bool, float]  # whether weights are trained -> bytes saved for the backward
    forwards: list[float] = field(default_factory=list)  # median milliseconds of each round
    # whether weights are trained -> median milliseconds of each round
    backwards: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def seconds(self) -> float:
        """Time of a forward and a backward."""
        return (min(self.forwards) + min(self.backwards[True])) / 1e3

    @property
    def point(self) -> MeasuredPoint:
        """The measurement, from the fastest round."""
        data = min(self.backwards[False])
        return MeasuredPoint(
            tokens=self.tokens,
            sequences=self.sequences,
            forward=min(self.forwards),
            data_gradient=data,
            weight_gradient=max(0.0, min(self.backwards[True]) - data),
            activations=self.saved_bytes[True],
            frozen_activations=self.saved_bytes[False],
        )


class _Part:
    """A layer with weights, the computation before or after the layers, or all of them together."""

    def __init__(self, runs: ModuleRuns, layer: nn.Module | None, indices: Sequence[int]):
        self.runs, self.layer, self.index = runs, layer, indices[0]
        uses = runs.skeleton.spec.uses
        names = {use.parameter.name for index in indices for use in uses.get((runs.name, index), ())}
        named = runs.skeleton.model.named_parameters()
        self.parameters = [p for name, p in named if name in names and p.is_floating_point()]

    def chunk(self, inputs: Inputs) -> Chunk:
        """Prepares a chunk: measures its saved bytes, and warms up compilation, allocation and gradients."""
        run, shared = self._forward(inputs.batch)
        saved_bytes = {trained: self._saved_bytes(run, shared, trained) for trained in (True, False)}
        for trained in saved_bytes:
            self._timed(run, trained)
        return Chunk(inputs.tokens, inputs.sequences, run, saved_bytes)

    def time(self, chunk: Chunk, budget_s: float) -> None:
        """Times one round: at least one forward and backward with trained weights, and one with frozen weights."""
        forwards, backwards = [], {True: [], False: []}
        end = time.monotonic() + budget_s
        while not forwards or time.monotonic() < end:
            for trained, times in backwards.items():
                forward, backward = self._timed(chunk.run, trained)
                forwards.append(forward)
                times.append(backward)
        chunk.forwards.append(median(forwards))
        for trained, times in backwards.items():
            chunk.backwards[trained].append(median(times))

    def forget(self) -> None:
        """Drops the gradients, which accumulate over rounds."""
        for parameter in self.parameters:
            parameter.grad = None

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Callable[[], Forward], list[Tensor]]:
        """Returns a function that runs one forward, and tensors shared by all layers, such as rotary embeddings."""
        if not self.runs.spec.is_chain:
            return partial(self.runs.run_whole, batch), []
        if self.index == -1:
            return partial(self.runs.run_before, batch), []
        args, kwargs = self.runs.arguments(batch, min(self.index, self.runs.spec.num_layers - 1))
        hidden = torch.randn_like(hidden_of(args, kwargs))
        if self.layer is None:
            return partial(self.runs.run_after, batch, hidden), []
        rows: Any = getattr(self.layer, "split_rows", None)
        if rows is not None:
            hidden = split_rows(hidden, rows.group)
        return partial(self.runs.run_layer, self.layer, args, kwargs, hidden), list(_tensors((args, kwargs)))

    def _timed(self, run: Callable[[], Forward], trained: bool) -> tuple[float, float]:
        """Times of a forward and its backward in milliseconds."""
        clock = self.runs.clock
        for parameter in self.parameters:
            parameter.requires_grad_(trained)
        forward = run()
        outputs = [output for output in forward.outputs if output.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        start = clock.mark()
        if outputs:
            torch.autograd.backward(outputs, gradients)
        end = clock.mark()
        backward_ms = clock.ms(start, end) if outputs else 0.0
        return clock.ms(forward.start, forward.end), backward_ms

    def _saved_bytes(self, run: Callable[[], Forward], shared: list[Tensor], trained: bool) -> float:
        """Bytes that autograd saves, without weights and shared tensors."""
        for parameter in self.parameters:
            parameter.requires_grad_(trained)
        others = (*self.parameters, *self.runs.skeleton.model.buffers(), *shared)
        excluded = {_storage(tensor).data_ptr() for tensor in others}
        storages: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = _storage(tensor)
            storages[storage.data_ptr()] = storage  # keeps it alive, so that its address is not reused
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        return float(sum(storage.nbytes() for address, storage in storages.items() if address not in excluded))


def _storage(tensor: Tensor) -> Any:
    """The storage of a tensor, or of this rank's shard of a `DTensor`."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Iterates over all tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for part in value.values() for tensor in _tensors(part))
    elif isinstance(value, (tuple, list)):
        yield from (tensor for part in value for tensor in _tensors(part))


def layer_kinds(runs: ModuleRuns) -> list[tuple[str, tuple[int, ...]]]:
    """Returns class and indices of each kind of layers: one class, with equal shapes, settings, masks and bounds."""
    layers = runs.skeleton.layers[runs.name]
    calls = runs.calls(runs.inputs(_PROBE_TOKENS, 1).batch)
    settings = [_settings(layer) for layer in layers]
    index_paths = {path for path in settings[0] if all(s.get(path) == i for i, s in enumerate(settings))}
    config = getattr(runs.skeleton.model.get_submodule(runs.spec.tower), "config", None)
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds: dict[tuple, list[int]] = {}
    for index, layer in enumerate(layers):
        plain = sorted((path, repr(value)) for path, value in settings[index].items() if path not in index_paths)
        shapes = shape_digest(runs.skeleton.spec, runs.name, index)
        key = (type(layer).__name__, types[index], shapes, tuple(plain), _describe(calls[index]))
        kinds.setdefault(key, []).append(index)
    return [(key[0], tuple(indices)) for key, indices in kinds.items()]


def _settings(layer: nn.Module) -> dict[str, Any]:
    """The plain public attributes of a layer and its submodules, by path."""
    return {
        f"{path}.{name}": value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str, type(None))) and not name.startswith("_") and name != "training"
    }


def _describe(value: Any) -> str:
    """A text with everything in a layer's arguments that affects its cost: shapes, integers, and float masks."""
    if isinstance(value, Tensor):
        content = value if not value.is_floating_point() else value < _MASKED
        digest = hashlib.sha256(content.contiguous().cpu().numpy().tobytes()).hexdigest()
        return f"{tuple(value.shape)}:{digest}"
    if isinstance(value, Mapping):
        return repr({key: _describe(part) for key, part in value.items()})
    if isinstance(value, (tuple, list)):
        return repr([_describe(part) for part in value])
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
