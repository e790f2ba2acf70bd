"""What a rank holds of a parameter: nothing, without memory, and identity layers where it holds none; or a shard."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves


def is_unowned(parameter: Tensor) -> bool:
    """Returns whether a parameter belongs to another rank; it then has a shape but no values."""
    return getattr(parameter, "is_unowned", False)


def unowned_parameter(parameter: nn.Parameter, device: torch.device | str | None) -> nn.Parameter:
    """Makes a parameter of the same shape and dtype that is one expanded element."""
    if device is None:
        device = "cpu" if parameter.is_meta else parameter.device
    # a model that reads it outputs NaN and not a wrong number
    value = torch.nan if parameter.is_floating_point() else 0
    data = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
    result = nn.Parameter(data, requires_grad=False)
    result.is_unowned = True  # type: ignore[attr-defined]
    return result


def drop_unowned_parameters(
    model: nn.Module, is_owned: Callable[[str], bool], device: torch.device | str | None
) -> dict[str, nn.Parameter]:
    """Replaces all parameters whose first name is not owned, and returns the new ones by name; tied ones stay tied."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    replaced: dict[str, nn.Parameter] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in names:
                continue
            name = names[id(parameter)]
            if is_owned(name):
                continue
            if name not in replaced:
                replaced[name] = unowned_parameter(parameter, device)
            module._parameters[attribute] = replaced[name]
    return replaced


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the hidden state among the arguments of a layer, which is the first one."""
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict]:
    if args:
        return (hidden, *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: hidden}


# before Python 3.11.8 two threads that parse at once fail with "AST constructor recursion depth mismatch"
_PARSING = threading.Lock()


@cache
def _num_outputs(cls: type[nn.Module]) -> int:
    """Values of the tuple that a layer's forward returns by its source, 0 for a bare tensor."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
    except OSError:
        return 0
    with _PARSING:
        tree = ast.parse(textwrap.dedent(source))
    longer: set[str] = set()
    named = {
        target.id: len(node.value.elts)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Tuple):
            longer.add(node.target.id)  # once, as in both branches of a condition
    named = {name: size + (name in longer) for name, size in named.items()}
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    sizes = [len(v.elts) for v in returned if isinstance(v, ast.Tuple)]
    return max([*sizes, *(named[v.id] for v in returned if isinstance(v, ast.Name) and v.id in named)], default=0)


class ElsewhereError(ValueError, AttributeError):
    """Raised for what another rank has; an `AttributeError`, too, so that `hasattr` answers `False`."""


class Elsewhere:
    """Stands for a value that another rank has: any use, but a comparison with `None`, raises [`ElsewhereError`]."""

    def __init__(self, sentence: str):
        self.__dict__["sentence"] = sentence

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ElsewhereError(self.sentence)

    def __getattr__(self, name: str) -> Any:
        # what Python itself looks up, such as `__deepcopy__`, is not there
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_leaves((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, cls) and leaf._refuse())

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = __add__ = __mul__ = _refuse


def _pass_through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hidden, count = hidden_of(args, kwargs), self.__dict__["num_outputs"]
    if not count:
        return hidden
    name = type(self).__name__.removeprefix("Identity")
    missing = Elsewhere(
        f"`{name}` returns more than its hidden state, and what it returns is read in another stage, to which only "
        "hidden states are sent. Use `pp_size=1`, with `dp_size` or `tp_size` above 1 for more ranks."
    )
    return (hidden, *[missing] * (count - 1))


def _get_absent(self: nn.Module, name: str) -> Any:
    if name in self.__dict__.get("absent", ()):
        kind = type(self).__name__.removeprefix("Identity")
        raise ElsewhereError(
            f"The model reads `{name}` of a `{kind}` that is in another stage. Use `pp_size=1` for its module, with "
            "`dp_size` or `tp_size` above 1 for more ranks."
        )
    return nn.Module.__getattr__(self, name)


def identity_layer(layer: nn.Module, shared: Collection[int] = ()) -> nn.Module:
    """A layer that hands on its hidden state; of its parts it has those with a parameter among `shared`, by its id."""
    cls = type(layer)
    # a subclass with the layer's plain attributes, so that code around the list of layers (masks by layer type,
    # recording of hidden states by class) still works
    identity_cls = type(f"Identity{cls.__name__}", (cls,), {"forward": _pass_through, "__getattr__": _get_absent})
    result = identity_cls.__new__(identity_cls)
    nn.Module.__init__(result)
    left_out = {*result.__dict__, "forward", "_compiled_call_impl"}  # a layer may have been wrapped or compiled
    result.__dict__.update({name: value for name, value in layer.__dict__.items() if name not in left_out})
    # those by which transformers records hidden states, if the model has been run before
    result.__dict__.update({name: copy.copy(value) for name, value in layer.__dict__.items() if "hooks" in name})
    result.__dict__.update(num_outputs=_num_outputs(cls), is_identity_layer=True, gradient_checkpointing=False)
    kept = {name: part for name, part in layer.named_children() if any(id(p) in shared for p in part.parameters())}
    result._modules.update(kept)
    result.__dict__["absent"] = {*layer._modules, *layer._parameters, *layer._buffers} - kept.keys()
    result.train(layer.training)
    return result


# Hooks on the layers of a stack that let a forward of the model start and stop at any layer.


class StageExit(Exception):
    """Raised to leave a forward at the entry of a layer, with its arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.hidden = hidden_of(args, kwargs)
        self.arguments = args, kwargs


@dataclass
class StageRun:
    first: int  # the received hidden state replaces its input
    stop: int  # the layer at whose entry the forward stops
    # outputs of earlier layers that were received, by layer: of the one before `first`, and of taps
    received: dict[int, Tensor] = field(default_factory=dict)
    # puts what else was received among the arguments of the first layer
    place: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda args, kwargs: (args, kwargs)
    taps: tuple[int, ...] = ()  # layers whose outputs are kept for later stages, -1 for the input of the first one
    kept: dict[int, Tensor] = field(default_factory=dict)
    left: Any = None  # arguments of the layer at whose entry the forward stopped
    probe: bool = False  # stops at the entry of the first layer
    entered: bool = False
    dtype: torch.dtype | None = None  # of the hidden state that the model itself passes to the first layer
    num_tokens: int = 0  # of the hidden state that enters the stack, of all ranks that share them

    @property
    def hidden(self) -> Tensor | None:
        """The received hidden state that replaces the input of the first layer; `None` in a first stage."""
        return self.received.get(self.first - 1)


class LayerInterceptor:
    """Hooks on every layer of a stack, by which a forward uses a range of layers only."""

    def __init__(self, layers: nn.ModuleList):
        self.layers = layers
        self.run: StageRun | None = None
        self.checked = False
        self._passed: dict[int, nn.Module] = {}  # index -> what stands for a layer of this rank that a forward passes
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(index), with_kwargs=True)
            layer.register_forward_hook(self._after(index), prepend=True)  # transformers records what it returns

    @classmethod
    def of(cls, layers: nn.ModuleList) -> LayerInterceptor:
        """Returns the interceptor of a stack, which is created on first use."""
        if "interceptor" not in layers.__dict__:
            layers.__dict__["interceptor"] = cls(layers)
        return layers.__dict__["interceptor"]

    def _before(self, index: int):
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
            run = self.run
            if run is None:
                return None
            if index == run.stop:
                raise StageExit(args, kwargs)
            if index == 0:
                args, kwargs = self._enter_first(run, args, kwargs)
            if index == run.first:
                run.dtype = hidden_of(args, kwargs).dtype
            if index == 0:
                return args, kwargs
            if index != run.first:
                return None
            arrived = hidden_of(args, kwargs)
            if run.probe:
                raise StageExit(args, kwargs)
            assert run.hidden is not None
            if run.entered:
                raise ValueError(
                    f"`{type(layer).__name__}` runs several times in a forward of the model, whose layers can't be "
                    "split into stages. Use `pp_size=1`, with `dp_size` or `tp_size` above 1 for more ranks."
                )
            # the input of the layer, since the stage before has also computed what is between the layers (DeepStack
            # adds features)
            args, kwargs = with_hidden(args, kwargs, run.hidden.to(arrived.dtype))
            args, kwargs = run.place(args, kwargs)
            if not self.checked:
                _check_arguments(layer, args[1:], kwargs, run.hidden)
                self.checked = True
            run.entered = True
            return args, kwargs

        return hook

    def _enter_first(self, run: StageRun, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Keeps the input of the first layer, or gives it that which was received, where it is read again later."""
        entering = hidden_of(args, kwargs)
        run.num_tokens = entering.shape[-2]
        if run.first and -1 in run.received:
            entering = run.received[-1].to(entering.dtype)
            args, kwargs = with_hidden(args, kwargs, entering)
        if -1 in run.taps:
            run.kept[-1] = entering
        return args, kwargs

    def _after(self, index: int):
        """
        Gives received hidden states also as the outputs of the earlier layers that they are of, for encoders that read
        outputs of layers behind the last one (DeepStack, `vision_feature_layer=-2`), and would find those of identity
        layers; keeps the outputs of taps for later stages.
        """

        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any):
            run = self.run
            if run is None:
                return None
            state = output[0] if isinstance(output, tuple) else output
            is_given = index in run.received
            if is_given:
                state = run.received[index].to(state.dtype)
            if index in run.taps:
                run.kept[index] = state
            if not is_given:
                return None
            return (state, *output[1:]) if isinstance(output, tuple) else state

        return hook

    @contextmanager
    def running(self, run: StageRun) -> Iterator[None]:
        """Forwards in this context use the layers of `run`; those before it, of a virtual stage, do nothing."""
        outer, self.run = self.run, run
        own = {i: self.layers[i] for i in range(run.first) if not getattr(self.layers[i], "is_identity_layer", False)}
        for index, layer in own.items():
            if index not in self._passed:
                self._passed[index] = passed = identity_layer(layer)
                # the same hooks, also those that are added in a later forward
                vars(passed).update({name: value for name, value in vars(layer).items() if "hooks" in name})
            self.layers[index] = self._passed[index]
        try:
            yield
        finally:
            self.run = outer
            for index, layer in own.items():
                self.layers[index] = layer


def _check_arguments(layer: nn.Module, args: Any, kwargs: Any, hidden: Tensor) -> None:
    pending = [args, *((value,) for value in kwargs.values() if value is not hidden)]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (tuple, list)):
            pending += value
        elif isinstance(value, Tensor) and value.is_floating_point() and value is not hidden and value.isnan().any():
            raise ValueError(
                f"The layers of `{type(layer).__name__}` have an argument of shape {tuple(value.shape)} that depends "
                f"on weights of an earlier stage, so the module can't be split. Use `pp_size=1` for it."
            )


# The shards of this rank of parameters that tensor parallelism cuts, which are `DTensor`s.


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def give_own_memory(parameter: torch.nn.Parameter) -> None:
    """Copies the values of a parameter on this rank into contiguous memory that nothing else refers to."""
    give_values(parameter, local(parameter).clone(memory_format=torch.contiguous_format))


def give_values(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Lets a parameter have other memory on this rank."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = values  # whose `data` is that of the whole tensor, which has none
    else:
        parameter.data = values


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Returns a parameter's shape, also if DeepSpeed's ZeRO-3 shards it, so that it is empty on every rank."""
    return getattr(parameter, "ds_shape", parameter.shape)


def from_shard(shard: torch.Tensor, like: DTensor) -> DTensor:
    """Makes the tensor, of the shape and layout of `like`, of which this rank has `shard`; nothing is copied."""
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_as(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Cuts a whole tensor, which is the same on all ranks of the mesh, in the layout of `like`."""
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def is_on_mesh(tensor: torch.Tensor, process: int) -> bool:
    """Returns whether a tensor is a `DTensor` over a mesh that a process of the default group is in."""
    return isinstance(tensor, DTensor) and process in tensor.device_mesh.mesh.flatten().tolist()
