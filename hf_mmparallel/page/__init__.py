"""
A self-contained HTML page of a plan: its timeline, memory and workloads, and other plans.
Uses `plan`, `schedule` and `drawing`; imported by the planner and the Trainer.
"""

from .content import MemoryCurves, PlanChoice, PlanPage, TextTable
from .render import render_page, write_page

__all__ = ["MemoryCurves", "PlanChoice", "PlanPage", "TextTable", "render_page", "write_page"]
