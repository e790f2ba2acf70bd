"""Which rank does what when: tasks, order, actions, checks, simulation, pictures."""

from .actions import Action, DeadlockError, Message, Program, ProgramError, Task
from .checks import check_program
from .graph import GradientFlow, TaskGraph, build_graph
from .lowering import build_program, lower, receive_ahead
from .scheduler import Timeline, default_cost, live_caps, schedule_tasks
from .simulator import Simulation, Span, simulate

__all__ = [
    "Action",
    "DeadlockError",
    "GradientFlow",
    "Message",
    "Program",
    "ProgramError",
    "Simulation",
    "Span",
    "Task",
    "TaskGraph",
    "Timeline",
    "build_graph",
    "build_program",
    "check_program",
    "default_cost",
    "live_caps",
    "lower",
    "receive_ahead",
    "schedule_tasks",
    "simulate",
]
