"""The time of a message, from its samples: what the arrays of `StepCost.messages_ms` are tested against."""

from itertools import chain

from hf_mmparallel.cost import StepCost
from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.schedule import Message


def message_ms(cost: StepCost, message: Message) -> float:
    """Milliseconds of one message of a step."""
    costs, (before, after) = cost.costs, (message.source, message.target)
    if message.kind == "grad":
        before, after = after, before
    if costs.engine.blocking_messages and not message.crosses_boundary:
        return 0.0
    num_tokens = cost.chunks[before.module, before.replica, before.microbatch, before.chunk].tokens
    if message.crosses_boundary:
        sent, received = (
            cost.step.chunks[end.module, end.replica, end.microbatch][end.chunk] for end in (before, after)
        )
        shared = sorted(set(sent) & set(received))
        produced, language = (cost.sizes.tokens[name][shared] for name in (before.module, LANGUAGE_MODEL))
        num_tokens = int(sum(map(min, produced.tolist(), language.tolist())))
    grids = [cost.plan.stage(*end.stage_key).all_ranks for end in (before, after)]
    ranks = list(chain(*grids))
    rate = costs.engine.message_bytes_per_ms(costs.device, ranks) * min(map(len, grids))
    num_bytes = costs.value_bytes * num_tokens * costs.spec.edge_width(before.module, after.module)
    return costs.device.latency_us(ranks) / 1e3 + num_bytes / rate
