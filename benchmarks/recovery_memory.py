"""Memory of each rank's device while the plan of a run changes: what `recovery.py` compares with measured peaks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from hf_mmparallel.cost.activations import DTYPE_BYTES, FULL
from hf_mmparallel.cost.stage_memory import COPY_WINDOW_BYTES
from hf_mmparallel.plan import ModelSpec, ParameterSpec, StorageSettings, parameter_shards
from hf_mmparallel.resilience.state_copies import (
    Part,
    PlacedPlan,
    Slice,
    common_holdings,
    recovery_bytes,
    state_copies,
    value_bytes,
)


def _device_bytes(parameter: ParameterSpec, storage: StorageSettings) -> int:
    """Those of [`value_bytes`] that are on the device."""
    return DTYPE_BYTES.get(parameter.dtype, FULL) if storage.offload_optimizer else value_bytes(parameter, storage)


def _copied_bytes(parameter: ParameterSpec, storage: StorageSettings) -> int:
    """Bytes on the device of an element's copy in float32."""
    is_narrow = DTYPE_BYTES.get(parameter.dtype, FULL) < FULL
    return FULL * (parameter.trainable and storage.has_master_weights and is_narrow and not storage.offload_optimizer)


def recovery_memory(
    spec: ModelSpec, before: PlacedPlan, after: PlacedPlan, window_bytes: float = COPY_WINDOW_BYTES
) -> dict[int, float]:
    """
    Member -> the peak of its device while a plan follows another, see [`recovery_bytes`]; with an infinite window that
    of host memory, if the device is the host.
    """
    held, needed = common_holdings(spec, before, after)
    num_pieces = {member: Counter(name for name, _ in parts) for member, parts in held.items()}
    moved: dict[int, list[Part]] = defaultdict(list)
    for copy in state_copies(spec, before, after).copies:
        if num_pieces[copy.source][copy.parameter] > 1:  # it is cut out to be sent
            moved[copy.source].append((copy.parameter, copy.slice))

    def num_bytes(parts: Iterable[Part], of_element: Callable[[ParameterSpec, StorageSettings], int]) -> int:
        return sum(
            elements.num_elements(spec.parameters[name])
            * of_element(spec.parameters[name], after.plan.modules[spec.used_at[name][0][0]].storage)
            for name, elements in parts
        )

    result = {}
    had, will_have = _gathered_bytes(spec, before), _gathered_bytes(spec, after)
    for member, parts in needed.items():
        own = held.get(member, {})
        changed = {name for name, _ in parts.keys() ^ own.keys()}
        moved[member] += [part for part in parts if part[0] in changed]  # also what it keeps, to be joined anew
        kept = [part for part in parts if part[0] not in changed]
        # the optimizer makes new float32 copies of weights before those that are kept are freed
        laid_out = num_bytes(parts, _device_bytes) + num_bytes(kept, _copied_bytes) + will_have[member]
        held_bytes, moved_bytes = num_bytes(own, _device_bytes) + had[member], num_bytes(moved[member], value_bytes)
        result[member] = float(recovery_bytes(held_bytes, moved_bytes, laid_out, window_bytes))
    return result


def _gathered_bytes(spec: ModelSpec, placed: PlacedPlan) -> Counter[int]:
    """Member -> bytes of the weights that it has beside those that it updates, which others update (ZeRO-1 and 2)."""
    result: Counter[int] = Counter()
    for name, shards in parameter_shards(spec, placed.plan).items():
        parameter = spec.parameters[name]
        for shard in shards.shards if shards.zero_stage < 3 else ():
            if shard.zero_cut is not None:
                num_bytes = Slice.of(parameter, shard.cuts).num_elements(parameter) * DTYPE_BYTES.get(
                    parameter.dtype, FULL
                )
                for rank in set(shard.holders).difference(shard.updaters):
                    result[placed.members[rank]] += num_bytes
    return result
