"""
Scheduling of a step: its tasks, their order, the actions of each rank, their verification and simulation.
Pure functions of `plan` and numbers; may be imported by all code that plans, runs or draws a step.
"""

from .action_lists import Program
from .actions import Action, DeadlockError, Message, ProgramError, Task
from .graph import GradientFlow, TaskGraph, build_graph
from .in_flight import in_flight_1f1b, in_flight_eager, in_flight_limits, stage_depths
from .lowering import build_program, lower, program_of_parts
from .parts import Part, Representatives, find_representatives, representative_ranks
from .passes import REST, PassAction, SumBucket, in_buckets, pass_actions, step_passes, sum_buckets
from .program_checks import check_program
from .replay import Replay, simulate_parts
from .scheduler import Timeline, default_cost, order_tasks, schedule_tasks
from .simulator import Simulation, Span, SumSpan, TransferSpan, microbatch_forward_ms, simulate

__all__ = [
    "REST",
    "Action",
    "DeadlockError",
    "GradientFlow",
    "Message",
    "Part",
    "PassAction",
    "Program",
    "ProgramError",
    "Replay",
    "Representatives",
    "Simulation",
    "Span",
    "SumBucket",
    "SumSpan",
    "Task",
    "TaskGraph",
    "Timeline",
    "TransferSpan",
    "build_graph",
    "build_program",
    "check_program",
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
    "representative_ranks",
    "schedule_tasks",
    "simulate",
    "simulate_parts",
    "stage_depths",
    "step_passes",
    "sum_buckets",
]
