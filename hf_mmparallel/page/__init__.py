"""One HTML page of a plan that needs nothing else: its timeline, memory and workloads, and the plans beside it."""

from .content import MemoryCurves, PlanChoice, PlanPage, TextTable
from .render import render_page, write_page

__all__ = ["MemoryCurves", "PlanChoice", "PlanPage", "TextTable", "render_page", "write_page"]
