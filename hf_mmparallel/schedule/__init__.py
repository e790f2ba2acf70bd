"""
Scheduling of a step: its tasks, their order, the actions of each rank, their verification and simulation.
Pure functions of `plan` and numbers; may be imported by all code that plans, runs or draws a step.
"""

from .action_lists import Program
from .graph import GradientFlow, TaskGraph, build_graph
from .in_flight import in_flight_1f1b, in_flight_eager, in_flight_limits, stage_depths
from .kinds import Action, Message, ProgramError, Task
from .lowering import build_program, lower, program_of_parts
from .parts import Part, Representatives, find_representatives
from .passes import REST, PassAction, SumBucket, in_buckets, pass_actions, step_passes, sum_buckets
from .scheduler import Order, default_cost, order_tasks
from .timeline import Durations, Span, SumSpan, Timeline, TransferSpan, microbatch_forward_ms, retime, simulate

__all__ = [
    "REST",
    "Action",
    "Durations",
    "GradientFlow",
    "Message",
    "Order",
    "Part",
    "PassAction",
    "Program",
    "ProgramError",
    "Representatives",
    "Span",
    "SumBucket",
    "SumSpan",
    "Task",
    "TaskGraph",
    "Timeline",
    "TransferSpan",
    "build_graph",
    "build_program",
    "default_cost",
    "find_representatives",
    "in_buckets",
    "in_flight_1f1b",
    "in_flight_eager",
    "in_flight_limits",
    "lower",
    "microbatch_forward_ms",
    "order_tasks",
    "pass_actions",
    "program_of_parts",
    "retime",
    "simulate",
    "stage_depths",
    "step_passes",
    "sum_buckets",
]
