"""
Ranks as threads of one process: the executor on messages in memory, without a process group.

Tensor-parallel grids work too when the executor's collectives are replaced by [`ThreadCollectives`]. Rows of tokens
that ranks share are packed and cut as under the Trainer.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_mmparallel.data.context_tokens import ContextSharder
from hf_mmparallel.data.packing import PackingCollator
from hf_mmparallel.data.step_dataset import RankInputs, Reader, StepDataset
from hf_mmparallel.kernels import row_exchange
from hf_mmparallel.kernels.bitfield_attention import context_parallel
from hf_mmparallel.kernels.recurrent_layers import start_anew_at_samples
from hf_mmparallel.modeling import build_model_spec, module_parts, prepare_stages, token_loss
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, StepPlan, sync_groups
from hf_mmparallel.runtime import message_queues
from hf_mmparallel.runtime.executor import Executor, StepFunctions
from hf_mmparallel.runtime.groups import context_groups
from hf_mmparallel.runtime.message_queues import Handle, Transport
from hf_mmparallel.runtime.work import StepResult
from hf_mmparallel.schedule import build_program
from tests import tiny

TIMEOUT_S = 15.0


def run_threads(
    fn: Callable[[int], Any], world_size: int, after_failure: Callable[[int], None] = lambda rank: None
) -> list[Any]:
    """
    Calls `fn(rank)` on a thread for each rank; raises what the first failing rank raised, once all have ended.

    `after_failure(rank)` ends what others wait for.

    A rank that goes on would parse sources (of layers) while pytest parses those of the failure, which fails in Python
    before 3.11.8 with `SystemError: AST constructor recursion depth mismatch`.
    """
    done: queue.Queue = queue.Queue()

    def body(rank: int) -> None:
        try:
            done.put((rank, fn(rank), None))
        except Exception as error:
            done.put((rank, None, error))
            after_failure(rank)

    for rank in range(world_size):
        threading.Thread(target=body, args=(rank,), daemon=True).start()
    ended = [done.get(timeout=4 * TIMEOUT_S) for _ in range(world_size)]
    for _, _, error in ended:
        if error is not None:
            raise error
    return [result for _, result, _ in sorted(ended, key=lambda end: end[0])]


@dataclass
class LoopbackWorld:
    """The channels between ranks that are threads of one process."""

    timeout_s: float = 20.0
    channels: dict[tuple[int, int], queue.Queue] = field(default_factory=dict)
    posted: dict[tuple[int, int], list[_Posted]] = field(default_factory=lambda: defaultdict(list))

    def channel(self, source: int, target: int) -> queue.Queue:
        """The channel of a pair, the same one for both threads whoever asks first."""
        return self.channels.setdefault((source, target), queue.Queue())

    def transport(self, rank: int) -> LoopbackTransport:
        return LoopbackTransport(rank, self)

    def fail(self, rank: int, world_size: int) -> None:
        """Lets all others fail where they wait for a tensor of this rank."""
        for target in range(world_size):
            self.channel(rank, target).put(None)


class LoopbackTransport:
    """The end of one rank in a [`LoopbackWorld`]; shapes are checked, which `torch.distributed` does not do."""

    def __init__(self, rank: int, world: LoopbackWorld):
        self.rank = rank
        self.world = world

    def connect(self, channels: Iterable[tuple[int, int]]) -> None:
        pass

    def send(self, tensor: Tensor, target: int) -> Handle:
        self.world.channel(self.rank, target).put(tensor.detach().clone())
        return _Finished()

    def recv(self, buffer: Tensor, source: int) -> Handle:
        key = (source, self.rank)
        posted = _Posted(buffer, self.world.channel(*key), self.world.posted[key], self.world.timeout_s)
        self.world.posted[key].append(posted)
        return posted


class _Finished:
    """A transfer or a collective that was finished when it was started."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class _Posted:
    """A posted receive of a loopback channel; waiting for it first takes all that were posted before it."""

    def __init__(self, buffer: Tensor, channel: queue.Queue, posted: list[_Posted], timeout_s: float):
        self.buffer = buffer
        self.channel = channel
        self.posted = posted
        self.timeout_s = timeout_s
        self.done = False

    def wait(self) -> None:
        while not self.done:
            first = self.posted.pop(0)
            tensor = self.channel.get(timeout=self.timeout_s)
            assert tensor is not None, "the sender has failed"
            assert tensor.shape == first.buffer.shape and tensor.dtype == first.buffer.dtype, (
                f"sent {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(first.buffer.shape)} {first.buffer.dtype}"
            )
            first.buffer.copy_(tensor)
            first.done = True

    def is_completed(self) -> bool:
        return self.done


@dataclass
class ThreadGroup:
    """Ranks of one process that meet."""

    ranks: tuple[int, ...]
    given: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(len(self.ranks), timeout=TIMEOUT_S)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """What all ranks of the group gave, in their order."""
        self.given[rank] = tensor.clone()
        self.barrier.wait()
        result = [self.given[other] for other in self.ranks]
        self.barrier.wait()
        return result


@dataclass
class Membership:
    """A group as one of its ranks sees it."""

    group: ThreadGroup
    rank: int

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        return self.group.exchange(self.rank, tensor)


class ThreadCollectives:
    """Collectives of the executor and of attention, over [`Membership`] in place of process groups."""

    @staticmethod
    def all_gather_single(full: Tensor, part: Tensor, group: Membership) -> _Finished:
        full.copy_(torch.cat(group.exchange(part)))
        return _Finished()

    @staticmethod
    def all_reduce(tensor: Tensor, group: Membership) -> None:
        tensor.copy_(torch.stack(group.exchange(tensor)).sum(0))

    @staticmethod
    def all_to_all(output: Tensor, parts: Tensor, group: Membership) -> _Finished:
        ranks = group.group.ranks
        place = ranks.index(group.rank)
        output.copy_(torch.cat([tensor.chunk(len(ranks))[place] for tensor in group.exchange(parts)]))
        return _Finished()

    @staticmethod
    def send_rows(output: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Membership) -> None:
        place = group.group.ranks.index(group.rank)
        counts = group.exchange(torch.tensor(sent))
        parts = [own.split(n.tolist())[place] for own, n in zip(group.exchange(rows), counts, strict=True)]
        assert [len(part) for part in parts] == received
        output.copy_(torch.cat(parts))


def run_ranks(
    world_size: int,
    groups: Iterable[tuple[int, ...]],
    body: Callable[[int, LoopbackWorld, dict[tuple[int, ...], Any]], Any],
) -> list[Any]:
    """Calls `body` with each rank, the channels and the groups of that rank; all that is sent has to be received."""
    world, meetings = LoopbackWorld(TIMEOUT_S), {ranks: ThreadGroup(ranks) for ranks in groups}

    def of_rank(rank: int) -> Any:
        return body(rank, world, {ranks: Membership(own, rank) for ranks, own in meetings.items() if rank in ranks})

    def after_failure(rank: int) -> None:
        world.fail(rank, world_size)
        for meeting in meetings.values():
            meeting.barrier.abort()

    with (
        mock.patch.object(context_parallel, "_all_gather", ThreadCollectives.all_gather_single),
        mock.patch.object(context_parallel, "_all_to_all", ThreadCollectives.all_to_all),
        mock.patch.object(row_exchange, "_all_to_all", ThreadCollectives.send_rows),
        mock.patch.object(message_queues, "dist", ThreadCollectives),
    ):
        results = run_threads(of_rank, world_size, after_failure)
    assert all(channel.empty() for channel in world.channels.values()), "a message that nobody received"
    return results


@dataclass
class Outcome:
    """What a step left in all ranks together."""

    loss: float
    num_targets: int
    gradients: dict[str, Tensor]
    results: list[StepResult]
    models: list[PreTrainedModel]  # of the ranks


def reference(model: PreTrainedModel, batch: Mapping[str, Any]) -> tuple[float, int, dict[str, Tensor]]:
    """Loss (a sum over target tokens), target tokens and gradients of one process on the whole batch."""
    model = copy.deepcopy(model)
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
    loss, count = token_loss(model, logits, batch["labels"])
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), int(count), gradients


def run_loopback(
    model: PreTrainedModel,
    plan: ParallelPlan,
    step: StepPlan,
    dataset: Any,
    collator: Callable[[list], Mapping[str, Any]],
    training: bool = True,
    transport: Callable[[int, LoopbackWorld], Transport] = LoopbackTransport,
    spec: ModelSpec | None = None,  # of the model, if it is known
) -> Outcome:
    """
    Runs a step of `model` under `plan`, each rank on a pruned copy; gradients are summed over the ranks. The samples
    of a microbatch are packed where ranks share its tokens.
    """
    spec = spec or build_model_spec(model)
    program = build_program(plan, step, sync_groups(spec, plan), training=training)
    copies = [copy.deepcopy(model) for _ in range(plan.world_size)]
    shared = context_groups(plan)
    if shared:
        collator = PackingCollator(collator, tiny.attending(copy.deepcopy(model)))
        copies = [tiny.attending(own) for own in copies]
        for own in copies:
            start_anew_at_samples(own)
    cast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")  # which threads do not inherit

    def rank_body(rank: int, world: LoopbackWorld, groups: dict[tuple[int, ...], Any]) -> StepResult:
        own = copies[rank]
        executor = Executor(
            plan,
            spec,
            prepare_stages(own, spec, plan, rank),
            transport(rank, world),
            groups,
            StepFunctions(lambda logits, labels, shifted: token_loss(own, logits, labels, shifted=shifted)),
            torch.device("cpu"),
        )
        media = frozenset(
            name for part in module_parts(own).values() for m in part.modalities for name in part.input_names(m)
        )
        sharders: dict = {}
        for name, module in plan.modules.items():
            if module.cp_size > 1:
                sharders[name] = ContextSharder(plan, spec.placeholders, media)
        source = StepDataset(Reader(dataset, collator), RankInputs(plan, rank, sharders=sharders), 0)
        batch = source.read(step)
        with torch.set_grad_enabled(training), torch.autocast("cpu", dtype, enabled=cast):
            return executor.run(program, batch)

    results = run_ranks(plan.world_size, shared, rank_body)
    gradients: dict[str, Tensor] = {}
    for own in copies:
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    assert all(task.module == LANGUAGE_MODEL for result in results for task in result.losses)
    losses = [loss for result in results for loss in result.losses.values()]
    loss, count = sum(float(loss) for loss, _ in losses), sum(int(count) for _, count in losses)
    return Outcome(loss, count, gradients, results, copies)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """
    Compares gradients by the norm of their difference, over all parameters and for each.

    A parameter whose gradient is rounding only (the bias of keys, which the softmax does not see) is compared with
    the norm over all parameters.
    """
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))
    total = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    error = 0.0
    for name, gradient in expected.items():
        norm = float(gradient.double().norm())
        difference = float((found[name].double() - gradient.double()).norm())
        error += difference**2
        scale = norm if norm > 1e-5 * total else total
        assert difference <= 10 * tolerance * scale, f"{name}: {difference / scale:.1e} of {scale:.1e}"
    assert error**0.5 <= tolerance * total, f"all: {error**0.5 / total:.1e}"
