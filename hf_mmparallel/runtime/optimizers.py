"""
Optimizers on the parameters of one rank.

A rank holds some of the model's parameters, and shards of some of these as `DTensor`s; under ZeRO it updates slices of
them. Which optimizers give the same update then as on the whole model is found out by trying: a few steps on tensors
of a few elements, before training.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..modeling.unowned import local
from ..plan import StorageSettings
from ..world import World
from .held_state import check_cuttable
from .optimizer_slices import OptimizerSlices, local_shard, optimizer_name, settings_of, slice_of, whole_parameter
from .updated_copies import (
    OffloadedStep,
    check_offloaded,
    copy_for_update,
    drop_gradients,
    entries_of,
    hand_over_gradients,
    is_offloaded,
    needs_copy,
    write_back,
)

_NUM_STEPS = 2
_MANY_VALUES = 4096  # of which some optimizers, such as 8-bit ones, make state of other shapes
_HOOKS = "_hf_mmparallel_hooks"


@dataclass(frozen=True)
class PossibleCuts:
    """How the plans of a run may cut a parameter."""

    name: str
    dim: int
    sizes: tuple[int, ...]  # of tp groups; 1 where one has all of it


def prepare_optimizer(
    optimizer: torch.optim.Optimizer,
    holds_all: bool,
    world: World,
    slices: OptimizerSlices | None = None,
    storage: Mapping[Any, StorageSettings] | None = None,  # those that are left out are updated in place
    # of a run that may go on under other plans: how these cut parameters, without those that none of them cuts
    later: Mapping[Any, PossibleCuts] | None = None,
) -> None:
    """
    Makes an optimizer, without state of its parameters, give them the update that they have on one process.
    Collective; raises `ValueError` on all ranks for one whose update would differ or fail, now or under a later plan.
    Gradients reach it in the dtype of what it updates.
    """
    sliced: Mapping[nn.Parameter, nn.Parameter] = {} if slices is None else slices.by_parameter
    devices = sorted({p.device for p in entries_of(optimizer) if p.device.type != "cpu"}, key=str)
    device_type = devices[0].type if devices else "cuda"

    def probe() -> bool:
        if not holds_all:
            whole = "a plan in which every rank holds the whole model (`dp_size` of modules that share ranks)"
            _check_independence(optimizer, "each rank of this plan has only some of them", whole)
        elif sliced:
            _check_independence(optimizer, "each rank of this plan updates only slices of them", "`zero_stage=0`")
        elif later is not None:
            _check_independence(optimizer, "ranks may have only some of them after a failure", "no `resilience`")
        _check_slices(optimizer, sliced)
        _check_later_cuts(optimizer, later or {})
        _check_copies(optimizer, storage or {})
        return _needs_local_shards(optimizer, sliced)

    with torch.random.fork_rng([device.index for device in devices], device_type=device_type):
        on_shards = world.raise_together(probe)
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter in sliced:
                _replace(optimizer, group, index, sliced[parameter])
            # it doesn't know `DTensor` but updates every element by itself, such as those of bitsandbytes
            elif on_shards and isinstance(parameter, DTensor):
                _replace(optimizer, group, index, local_shard(parameter))
    _update_copies(optimizer, storage or {})
    hooks = [optimizer.register_step_pre_hook(hand_over_gradients)]
    if any(map(is_offloaded, entries_of(optimizer))):
        hooks.append(optimizer.register_step_pre_hook(OffloadedStep(optimizer, world.device)))
    hooks.append(optimizer.register_step_post_hook(write_back))
    hooks.append(optimizer.register_step_post_hook(drop_gradients))
    if sliced and slices is not None:
        hooks.append(optimizer.register_step_post_hook(slices.gather_weights))
    for of_last_plan in vars(optimizer).pop(_HOOKS, ()):
        of_last_plan.remove()  # of an earlier plan
    vars(optimizer)[_HOOKS] = hooks


def give_same_groups(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Gives the optimizers of all ranks the same groups in the same order, some of them empty. Collective."""
    kinds: Counter[str] = Counter()
    own: dict[tuple[str, int], dict[str, Any]] = {}
    for group in optimizer.param_groups:
        # `transformers` puts `DTensor`s into groups of their own
        is_cut = any(isinstance(parameter, DTensor) for parameter in group["params"])
        kind = repr((sorted(settings_of(group).items(), key=lambda item: item[0]), is_cut))
        own[kind, kinds[kind]] = group
        kinds[kind] += 1
    known: dict[tuple[str, int], dict[str, Any]] = {}
    mine = {key: settings_of(group) for key, group in own.items()}
    for of_rank in world.all_gather(mine, "comparing the groups of the optimizers"):
        known |= {key: settings for key, settings in of_rank.items() if key not in known}
    optimizer.param_groups[:] = [own.get(key) or {"params": [], **settings} for key, settings in known.items()]


def _replace(optimizer: torch.optim.Optimizer, group: dict[str, Any], index: int, entry: Any) -> None:
    parameter, flat_slice = group["params"][index], slice_of(entry)
    group["params"][index] = entry
    for key, value in optimizer.state.pop(parameter, {}).items():  # of optimizers that make it at once
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step":
            value = local(value) if flat_slice is None else flat_slice.of(local(value).contiguous())
            value = value.clone()
        optimizer.state[entry][key] = value


def _check_copies(optimizer: torch.optim.Optimizer, storage: Mapping[Any, StorageSettings]) -> None:
    settings = [storage[parameter] for parameter in entries_of(optimizer) if parameter in storage]
    if any(setting.offload_optimizer for setting in settings):
        check_offloaded(optimizer)
    if _changes_with_mode(optimizer) and any(setting.master_weights for setting in settings):
        raise ValueError(
            f"`{optimizer_name(optimizer)}` can't be used with `master_weights=True`: it changes the weights in "
            "`train()` and `eval()`, which would not reach the 16-bit weights. Use another one, such as "
            '`optim="adamw_torch"`, or `master_weights=False`.'
        )


def _changes_with_mode(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer changes weights outside of its steps, as schedule-free ones do."""
    return callable(getattr(optimizer, "eval", None))


def _update_copies(optimizer: torch.optim.Optimizer, storage: Mapping[Any, StorageSettings]) -> None:
    """Lets an optimizer update copies of weights where the settings ask for it, with their state."""
    in_place = StorageSettings(master_weights=False)
    for group in optimizer.param_groups:
        for index, entry in enumerate(group["params"]):
            setting = storage.get(whole_parameter(entry), in_place)
            if not needs_copy(entry, setting) or _changes_with_mode(optimizer):
                continue
            copied = group["params"][index] = copy_for_update(entry, setting)
            for key, value in optimizer.state.pop(entry, {}).items():  # of optimizers that make it at once
                is_of_elements = isinstance(value, torch.Tensor) and value.shape == entry.shape and key != "step"
                optimizer.state[copied][key] = value.to(copied.device, copied.dtype) if is_of_elements else value


def _check_independence(optimizer: torch.optim.Optimizer, what_ranks_have: str, remedy: str) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for num_dims in sorted({p.dim() for p in group["params"]}):
            like = next(p for p in group["params"] if p.dim() == num_dims)
            shape = [min(size, 4) for size in like.shape]
            mine, other = _Trial(shape, like.device, 1), _Trial(shape, like.device, 2)
            alone = _stepped(optimizer, index, [mine])
            beside = _stepped(optimizer, index, [other, mine])
            if isinstance(alone, Exception) or isinstance(beside, Exception):
                continue  # it can't be judged by so small a tensor
            if not _same_update(mine, alone[0], beside[1]):
                raise ValueError(
                    f"`{optimizer_name(optimizer)}` updates a parameter by its place among all parameters, or by the "
                    f"others' values, and {what_ranks_have}. Use an optimizer that updates each by itself, such as "
                    f'`optim="adamw_torch"`, or {remedy}.'
                )


def _check_slices(optimizer: torch.optim.Optimizer, sliced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    if not sliced:
        return
    cause = None
    if optimizer_name(optimizer).startswith("bitsandbytes."):
        cause = "it keeps its state by blocks and settings of whole parameters"
    # weights are gathered only after steps
    elif _changes_with_mode(optimizer):
        cause = "it changes the weights in `train()` and `eval()`, where each rank would change its slices only"
    if cause is not None:
        raise ValueError(
            f"`{optimizer_name(optimizer)}` can't be used with `zero_stage` above 0: {cause}. Use another one, "
            'such as `optim="adamw_torch"`, or `zero_stage=0`.'
        )
    for index, group in enumerate(optimizer.param_groups):
        likes = {parameter.dim(): parameter for parameter in group["params"] if parameter in sliced}
        for like in likes.values():
            trial = _Trial([min(size, 4) for size in like.shape], like.device, 5)
            want = _stepped(optimizer, index, [trial])
            if isinstance(want, Exception):
                continue  # it can't be judged by so small a tensor
            flat = copy.copy(trial)
            flat.value, flat.gradients = trial.value.flatten(), trial.gradients.reshape(_NUM_STEPS, -1)
            if not _steps_alike(optimizer, index, flat, want[0].flatten(), [(2, 0)]):
                raise ValueError(
                    f"`{optimizer_name(optimizer)}` can't be used with `zero_stage` above 0: each rank would update a "
                    "slice of the flattened parameters, and its update of a slice is not that slice of its update. "
                    'Use an optimizer that updates each element by itself, such as `optim="adamw_torch"`, or '
                    "`zero_stage=0`."
                )


def _needs_local_shards(optimizer: torch.optim.Optimizer, sliced: Collection[nn.Parameter]) -> bool:
    """Returns whether the optimizer steps on shards only as plain tensors. Raises `ValueError` if it can't at all."""
    needed = False
    for index, group in enumerate(optimizer.param_groups):
        kinds: dict[Any, Any] = {}
        for parameter in group["params"]:
            if parameter in sliced:
                continue
            mesh = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            kinds.setdefault((parameter.dim(), mesh), parameter)
        likes = list(kinds.values())
        cuts = [[(count, dim) for count, _, dim in _cuts(like)] for like in likes]
        trials = [_Trial(_divisible_shape(like, cuts[i]), like.device, 3 + i) for i, like in enumerate(likes)]
        expected = [_stepped(optimizer, index, [trial]) for trial in trials] if any(map(_cuts, likes)) else []
        alone = [result[0] for result in expected if not isinstance(result, Exception)]
        if not expected or len(alone) < len(likes):
            continue  # nothing is cut, or it can't be judged by so small tensors
        sharded = _stepped(optimizer, index, trials, likes)
        if not isinstance(sharded, Exception) and all(
            _same_update(trial, _part(want, like), local(got), like)
            for trial, want, got, like in zip(trials, alone, sharded, likes, strict=True)
        ):
            continue
        if not all(
            _steps_alike(optimizer, index, trial, want, of_trial)
            for trial, want, of_trial in zip(trials, alone, cuts, strict=True)
        ):
            cause = f" ({_first_line(sharded)})" if isinstance(sharded, Exception) else ""
            raise _cut_error(optimizer, cause)
        needed = True
    return needed


def _check_later_cuts(optimizer: torch.optim.Optimizer, later: Mapping[Any, PossibleCuts]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        kinds: dict[Any, nn.Parameter] = {}
        for parameter in group["params"]:
            if parameter in later:
                cuts = later[parameter]
                kinds.setdefault((parameter.dim(), cuts.dim, cuts.sizes), parameter)
        for (_, dim, sizes), like in kinds.items():
            # what is cut under the first plan is tried on its ranks
            for size in () if isinstance(like, DTensor) else set(sizes) - {1}:
                trial = _Trial(_divisible_shape(like, [(size, dim)]), like.device, 3)
                want = _stepped(optimizer, index, [trial])
                if isinstance(want, Exception):
                    continue  # it can't be judged by so small a tensor
                if not _steps_alike(optimizer, index, trial, want[0], [(size, dim)]):
                    raise _cut_error(optimizer, "")
            if len(sizes) > 1:
                _check_state(optimizer, index, like, later[like].name)


def _check_state(optimizer: torch.optim.Optimizer, index: int, like: torch.Tensor, name: str) -> None:
    most = round(_MANY_VALUES ** (1 / max(1, like.dim())))
    probe = _stepped_probe(optimizer, index, [_Trial([min(size, most) for size in like.shape], like.device, 4)])
    if not isinstance(probe, Exception):
        (parameter,) = probe.param_groups[0]["params"]
        check_cuttable(probe.state[parameter], parameter, name)


def _cut_error(optimizer: torch.optim.Optimizer, cause: str) -> ValueError:
    return ValueError(
        f"`{optimizer_name(optimizer)}` can't be used with `tp_size` above 1: it can't update matrices that are cut "
        f"over ranks{cause}, and its update of a part is not that part of its update. Use an optimizer that updates "
        'each element by itself, such as `optim="adamw_torch"`, or `tp_size=1`, which `resilience` keeps.'
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".strip()[:200]


class _Trial:
    """Values of a small parameter, and its gradients of a few steps, equal on all ranks."""

    def __init__(self, shape: Sequence[int], device: torch.device, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.value = torch.randn(list(shape), generator=generator).to(device)
        gradients = torch.randn(_NUM_STEPS, *shape, generator=generator)
        # Rows and columns of unlike size, so that what depends on the norm of a tensor differs from part to part.
        for dim, size in enumerate(shape, 1):
            scale = torch.logspace(0, 1, size)
            gradients *= scale.reshape([-1 if d == dim else 1 for d in range(len(shape) + 1)])
        self.gradients = gradients.to(device)


def _divisible_shape(like: torch.Tensor, cuts: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a small shape whose dimensions can be cut into these numbers of parts."""
    shape = [min(size, 4) for size in like.shape]
    for count, dim in cuts:
        shape[dim] = 2 * count
    return shape


def _cuts(like: Any) -> list[tuple[int, int, int]]:
    """Returns how a tensor is cut: the number of parts, which of them is this rank's, and the dimension."""
    if not isinstance(like, DTensor):
        return []
    mesh, placements = like.device_mesh, cast(Any, like.placements)
    return [(mesh.size(i), mesh.get_local_rank(i), p.dim) for i, p in enumerate(placements) if not p.is_replicate()]


def _part(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a small tensor that is cut as another one."""
    for count, index, dim in _cuts(like):
        value = value.chunk(count, dim)[index]
    return value.contiguous()


def _as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return value.clone()
    placements = [p if p.is_replicate() else Shard(p.dim) for p in cast(Any, like.placements)]
    return DTensor.from_local(_part(value, like).clone(), like.device_mesh, placements, run_check=False)


def _stepped(
    optimizer: torch.optim.Optimizer, index: int, trials: Sequence[_Trial], likes: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor] | Exception:
    """Returns small parameters after a few steps, see [`_stepped_probe`]."""
    probe = _stepped_probe(optimizer, index, trials, likes)
    return probe if isinstance(probe, Exception) else [p.detach() for p in probe.param_groups[0]["params"]]


def _stepped_probe(
    optimizer: torch.optim.Optimizer, index: int, trials: Sequence[_Trial], likes: Sequence[torch.Tensor] = ()
) -> Any:
    """A copy of the optimizer that has stepped small parameters a few times, with one group; an error if it fails."""
    likes = likes or [trial.value for trial in trials]
    parameters = [nn.Parameter(_as(trial.value, like)) for trial, like in zip(trials, likes, strict=True)]
    settings = {key: value for key, value in optimizer.param_groups[index].items() if key != "params"}
    group = {**copy.deepcopy(settings), "params": parameters}
    if isinstance(group.get("lr"), float):
        group["lr"] = 0.1  # a schedule may start from 0
    try:
        probe = _like(optimizer, group)
        if callable(getattr(probe, "train", None)):
            probe.train()
        for step in range(_NUM_STEPS):
            for parameter, trial, like in zip(parameters, trials, likes, strict=True):
                parameter.grad = _as(trial.gradients[step], like)
            probe.step()
    except Exception as error:  # whatever it is, it would come in the first step of training
        return error
    return probe


def _like(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """Makes an optimizer with the same settings and other parameters."""
    if optimizer.state:  # its constructor makes state for each parameter
        names = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
        constructor: Any = type(optimizer)
        return constructor([group], **{name: optimizer.defaults[name] for name in names})
    probe: Any = object.__new__(type(optimizer))
    plain = (dict, list, set)
    probe.__dict__.update({k: copy.copy(v) if isinstance(v, plain) else v for k, v in vars(optimizer).items()})
    probe.__dict__.pop("step", None)  # of this optimizer, as schedules wrap it
    probe.param_groups, probe.state = [group], defaultdict(dict)
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return probe


def _same_update(trial: _Trial, want: torch.Tensor, got: torch.Tensor, like: torch.Tensor | None = None) -> bool:
    start = trial.value if like is None else _part(trial.value, like)
    return torch.allclose(want - start, got - start, rtol=1e-3, atol=1e-5)


def _steps_alike(
    optimizer: torch.optim.Optimizer, index: int, trial: _Trial, want: torch.Tensor, cuts: Sequence[tuple[int, int]]
) -> bool:
    """Returns whether the parts of a tensor, each stepped on its own, become the parts of `want`."""
    pieces = [(trial.value, trial.gradients, want)]
    for count, dim in cuts:  # number of parts and dimension of each cut, one after the other
        pieces = [
            part
            for value, gradients, end in pieces
            for part in zip(
                value.chunk(count, dim), gradients.chunk(count, dim + 1), end.chunk(count, dim), strict=True
            )
        ]
    for value, gradients, end in pieces:
        piece = copy.copy(trial)
        piece.value, piece.gradients = value.contiguous(), gradients.contiguous()
        update = _stepped(optimizer, index, [piece])
        if isinstance(update, Exception) or not _same_update(piece, end, update[0]):
            return False
    return True
