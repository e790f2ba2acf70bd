"""
A device in host memory that counts what a program makes a GPU wait for.

Its tensors hold tensors of the CPU and compute on them, so that results are those of the CPU; the program sees another
device, from which values have to be copied. Every operation after which the host has to wait for a CUDA device is
recorded with the line of the package that asks for it, as `torch.cuda.set_sync_debug_mode` does on a GPU.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch._C._distributed_c10d import FakeProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.kernels.bitfield_attention import attention, context_parallel
from hf_mmparallel.kernels.bitfield_attention.words import BitfieldMask

ROOT = Path(__file__).resolve().parent.parent
NAME = "counted"
_ATEN = torch.ops.aten
_READS = {_ATEN._local_scalar_dense, _ATEN.is_nonzero, _ATEN.equal}
"""Return a number to the host."""
_SIZED_BY_VALUES = {
    _ATEN.nonzero,
    _ATEN.masked_select,
    _ATEN.unique_dim,
    _ATEN.unique_consecutive,
    _ATEN._unique,
    _ATEN._unique2,
    _ATEN.bincount,
    _ATEN.masked_scatter_backward,
}
"""Make a tensor whose size depends on values."""
_LIBRARY = torch.library.Library("aten", "IMPL", "PrivateUse1")
_COPIES = {_ATEN._to_copy, _ATEN.copy_}
_PINNED: dict[int, StorageWeakRef] = {}
"""Address -> storage of pinned memory."""


@dataclass(frozen=True)
class Wait:
    """An operation after which the host waits for the device."""

    kind: str
    where: str  # file and function of the package, or of who calls it


class Memory:
    """Bytes of the device's tensors, each storage once."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0
        self._num_tensors: Counter[int] = Counter()  # by address of the storage

    def add(self, tensor: CountedTensor) -> None:
        """Counts a tensor until it is freed."""
        storage = tensor.on_host.untyped_storage()
        self._count(storage.data_ptr(), storage.nbytes(), 1)
        weakref.finalize(tensor, self._count, storage.data_ptr(), storage.nbytes(), -1)

    def _count(self, address: int, num_bytes: int, change: int) -> None:
        before = self._num_tensors[address]
        self._num_tensors[address] += change
        self.num_bytes += num_bytes * ((before + change > 0) - (before > 0))
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class Counts:
    """What has been counted so far."""

    def __init__(self) -> None:
        self.waits: Counter[Wait] = Counter()
        self.copied_bytes: Counter[str] = Counter()  # by direction
        self.operations_s = 0.0  # processor time of operations on tensors of the device
        self.memory: Memory | None = None  # counted from when it is set

    def wait(self, kind: str) -> None:
        """Counts a wait of the caller's caller."""
        self.waits[Wait(kind, _caller())] += 1

    def clear(self) -> None:
        """Forgets what was counted."""
        self.waits.clear()
        self.copied_bytes.clear()
        self.operations_s = 0.0


COUNTS = Counts()


def _caller() -> str:
    """The innermost functions of the package and of what it calls, on the stack."""
    frame: Any = sys._getframe(2)
    called = None
    while frame is not None:
        file = frame.f_code.co_filename
        name = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        if "/hf_mmparallel/" in file and not file.endswith("/host_values.py"):  # which passes calls on
            own = f"{file.rpartition('/hf_mmparallel/')[2]}:{name}"
            return own if called is None else f"{own} > {called}"
        if called is None and "/torch/" not in file and "/hf_mmparallel/" not in file and file != __file__:
            called = f"{Path(file).name}:{name}"
        frame = frame.f_back
    return called or "unknown"


class CountedTensor(torch.Tensor):
    """A tensor of the device; `on_host` has its values."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor) -> CountedTensor:
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device=torch.device(NAME, 0),
        )
        result.on_host = on_host
        if COUNTS.memory is not None:
            COUNTS.memory.add(result)
        return result

    def __repr__(self, **kwargs: Any) -> str:
        return f"CountedTensor({self.on_host!r})"

    def __format__(self, spec: str) -> str:
        if torch.overrides.has_torch_function_unary(self):
            return torch.overrides.handle_torch_function(torch.Tensor.__format__, (self,), self, spec)
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def tolist(self) -> Any:
        if torch.overrides.has_torch_function_unary(self):  # a mode may know the values
            return torch.overrides.handle_torch_function(torch.Tensor.tolist, (self,), self)
        COUNTS.wait("to the host")
        return self.on_host.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _timed_run(func, args, kwargs or {})


def _on_host(value: Any) -> Any:
    return value.on_host if isinstance(value, CountedTensor) else value


def _is_pinned(tensor: torch.Tensor) -> bool:
    known = _PINNED.get(tensor.untyped_storage().data_ptr())
    return known is not None and not known.expired()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory."""
    copy = tensor.clone()
    storage = copy.untyped_storage()
    _PINNED[storage.data_ptr()] = StorageWeakRef(storage)
    return copy


def _timed_run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """[`_run`], whose time counts once where operations run others."""
    begin, before = time.process_time(), COUNTS.operations_s
    result = _run(func, args, kwargs)
    COUNTS.operations_s = before + time.process_time() - begin
    return result


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the values in host memory, and counts it if a host would wait for it."""
    if func.overloadpacket in (_ATEN.pin_memory, _ATEN._pin_memory):
        return _pinned(args[0])
    if func.overloadpacket is _ATEN.is_pinned:
        return _is_pinned(args[0])
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    counted = [tensor for tensor in given if isinstance(tensor, CountedTensor)]
    asked = kwargs.get("device")
    is_counted = bool(counted) if asked is None else torch.device(asked).type == NAME
    if counted or is_counted:
        _count(func, args, kwargs, bool(counted), is_counted)
    if asked is not None and is_counted:
        kwargs = {**kwargs, "device": "cpu"}
    on_host = tree_map(_on_host, args), tree_map(_on_host, kwargs)
    run = functools.partial(_communicate, func) if func.namespace == "c10d" and _ABORTED else func
    result = run(*on_host[0], **on_host[1])
    if func.overloadpacket is _ATEN.copy_:
        return args[0]
    if not is_counted:
        return result
    known = {id(tensor.on_host): tensor for tensor in counted}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else CountedTensor(value)

    return tree_map(wrap, result)


_ABORTED: list[Callable[[], bool]] = []
"""Says whether the communicators of this process have been aborted, if their collectives are to end as NCCL's do."""
_GARBAGE = 1e6


def abort_as_nccl(aborted: Callable[[], bool]) -> None:
    """
    Lets collectives of the device end as those of NCCL do when a peer is lost: they wait until the communicator is
    aborted by this process, and then leave any numbers, without an error.
    """
    _ABORTED.append(aborted)


def _communicate(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a collective to its end; messages, which return no values, end as they do without this."""
    result = func(*args, **kwargs)
    if not isinstance(result, tuple):
        return result
    *values, work = result
    try:
        dist.Work.unbox(work).wait()
    except RuntimeError:
        while not _ABORTED[0]():
            time.sleep(0.01)
        values = [args[0]]
        for tensor in tree_leaves(values):
            tensor.fill_(_GARBAGE)
        done = torch.futures.Future()
        done.set_result(values)
        work = torch._C._distributed_c10d._create_work_from_future(done).boxed()
    return (*values, work)


def _count(func: Any, args: tuple, kwargs: dict[str, Any], has_counted: bool, is_counted: bool) -> None:
    operation = func.overloadpacket
    if operation in _READS:
        COUNTS.wait("read")
    elif operation in _SIZED_BY_VALUES or (operation is _ATEN.repeat_interleave and kwargs.get("output_size") is None):
        COUNTS.wait("size from values")
    elif operation in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_):
        # indices in host memory are copied; a mask makes its own, whose number is not known
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                COUNTS.wait("size from values")
            elif index is not None and not isinstance(index, CountedTensor):
                COUNTS.wait("to the device")
    elif operation in _COPIES:
        source = args[0] if operation is _ATEN._to_copy else args[1]
        target_counted = is_counted if operation is _ATEN._to_copy else isinstance(args[0], CountedTensor)
        source_counted = isinstance(source, CountedTensor)
        if source_counted != target_counted:
            direction = "to the device" if target_counted else "to the host"
            COUNTS.copied_bytes[direction] += source.nbytes
            non_blocking = kwargs.get("non_blocking") or (operation is _ATEN.copy_ and len(args) > 2 and args[2])
            # a copy to the host without blocking makes pinned memory of its own
            if not non_blocking or (target_counted and not _is_pinned(source)):
                COUNTS.wait(direction)


class _Factories(TorchDispatchMode):
    """Makes the tensors that are asked for on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _timed_run(func, args, kwargs or {})


class _Queue:
    """The device's stream."""

    num_events = 0
    num_done = 0  # events that the host can know to have passed


_QUEUE = _Queue()


def catch_up() -> None:
    """Lets the device finish all that is queued, as it has when a host that ran ahead comes back to it."""
    _QUEUE.num_done = _QUEUE.num_events


class _Event:
    """An event on the device's stream."""

    def __init__(self, **kwargs: Any):
        self.queued, self.recorded_s = 0, 0.0

    def record(self, stream: Any = None) -> None:
        self.queued = _QUEUE.num_events = _QUEUE.num_events + 1
        self.recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return self.queued <= _QUEUE.num_done

    def synchronize(self) -> None:
        if not self.query():
            COUNTS.wait("event")
            catch_up()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.recorded_s - self.recorded_s)


class _Module(backend_registration._DummyBackendModule):
    """What `torch.counted` is."""

    Event = _Event

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def synchronize(self, device: Any = None) -> None:
        COUNTS.wait("synchronize")


def counted_device() -> torch.device:
    """Registers the device in this process, once, and returns it."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
        # where a number is wanted, such as a value to fill with, torch calls it below the dispatch to Python
        _LIBRARY.impl("_local_scalar_dense", lambda tensor: _run(_ATEN._local_scalar_dense.default, (tensor,), {}))
    return torch.device(NAME, 0)


def _as_one_operation(compute_on_host: Callable[..., Any]) -> Callable[..., Any]:
    """Bitfield attention on the device, as one operation, which the CPU's kernels compute in host memory."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        def on_host(value: Any) -> Any:
            if isinstance(value, BitfieldMask):
                return BitfieldMask(*map(_on_host, value.tensors))
            return _on_host(value)

        given = [*args, *kwargs.values()]
        if not any(isinstance(value, CountedTensor) for value in given):
            return compute_on_host(*args, **kwargs)
        kwargs = {name: on_host(value) for name, value in kwargs.items()} | {"backend": "cpu"}
        begin = time.process_time()
        with _disable_current_modes():
            result = compute_on_host(*map(on_host, args), **kwargs)
        COUNTS.operations_s += time.process_time() - begin
        return tree_map(lambda value: CountedTensor(value) if isinstance(value, torch.Tensor) else value, result)

    return compute


@contextmanager
def use_device() -> Iterator[torch.device]:
    """A block in which tensors can be made on the device."""
    device = counted_device()
    # `torch.tensor(..., device=...)` makes a tensor of the CPU and moves it, as an operation that the mode sees
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Factories(), ExitStack() as patches:
            for module in (attention, context_parallel):
                for name in ("attention_forward", "attention_backward"):
                    computed = _as_one_operation(getattr(module, name))
                    patches.enter_context(patch.object(module, name, computed))
                patches.enter_context(patch.object(module, "default_backend", lambda query: "triton"))
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextmanager
def train_on_device() -> Iterator[None]:
    """A block in which the Trainer trains on the counted device."""
    device = counted_device()
    found = MultimodalTrainingArguments.__dict__["_setup_devices"].func

    def set_up(args: Any) -> torch.device:
        found(args)
        PartialState._shared_state["device"] = device
        return device

    patched = functools.cached_property(set_up)
    patched.__set_name__(MultimodalTrainingArguments, "_setup_devices")
    settings = patch.object(MultimodalTrainingArguments, "_setup_devices", patched)
    with settings, use_device():
        yield


def _make_backend(common: Any, options: Any) -> Any:
    """Makes the part of a group that stands for NCCL; tensors are sent by the part for the CPU."""
    # torch.distributed asks it for its name and time limit only: operations on counted tensors run on those in host
    # memory, for which the group has gloo
    own = FakeProcessGroup.Options()
    own._timeout = common.timeout
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, own)


def init_process_group(rank: int, world_size: int, init_method: str) -> None:
    """Joins the default group, over which tensors are sent from device to device."""
    counted_device()
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make_backend, extended_api=True, devices=[NAME])
    dist.init_process_group(f"cpu:gloo,{NAME}:{NAME}", init_method=init_method, rank=rank, world_size=world_size)
