"""
Scheduling of a step: its tasks, their order, the actions of each rank, their verification and simulation.

Pure functions of `plan` and numbers; may be imported by all code that plans, runs or draws a step.
"""

from .actions import Action, DeadlockError, Message, ProgramError, Task
from .graph import GradientFlow, TaskGraph, build_graph
from .in_flight import in_flight_1f1b, in_flight_eager, in_flight_limits, stage_depths
from .lowering import build_program, condensed_program, lower, receive_ahead
from .parts import Condensed, Part, condense, condensed_ranks
from .program import Program
from .program_checks import check_program
from .replay import Replay, simulate_parts
from .scheduler import Timeline, default_cost, order_tasks, schedule_tasks
from .simulator import Simulation, Span, SumSpan, microbatch_forward_ms, simulate

__all__ = [
    "Action",
    "Condensed",
    "DeadlockError",
    "GradientFlow",
    "Message",
    "Part",
    "Program",
    "ProgramError",
    "Replay",
    "Simulation",
    "Span",
    "SumSpan",
    "Task",
    "TaskGraph",
    "Timeline",
    "build_graph",
    "build_program",
    "check_program",
    "condense",
    "condensed_program",
    "condensed_ranks",
    "default_cost",
    "in_flight_1f1b",
    "in_flight_eager",
    "in_flight_limits",
    "lower",
    "microbatch_forward_ms",
    "order_tasks",
    "receive_ahead",
    "schedule_tasks",
    "simulate",
    "simulate_parts",
    "stage_depths",
]
