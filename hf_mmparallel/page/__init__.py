"""
A self-contained HTML page of a plan: its timeline, memory and workloads, and other plans.
Uses `plan`, `schedule` and `drawing`; imported by the planner and the Trainer.
"""

from .render import render_page, render_repr, write_page
from .script_data import MemoryCurves, PlanChoice, PlanPage, TextTable

__all__ = ["MemoryCurves", "PlanChoice", "PlanPage", "TextTable", "render_page", "render_repr", "write_page"]
