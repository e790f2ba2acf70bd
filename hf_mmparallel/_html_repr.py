"""What notebooks show of plans and steps."""

from __future__ import annotations

from importlib import import_module


class HtmlRepr:
    """Base of what draws itself in a notebook; how it does is loaded when it is drawn."""

    def _repr_html_(self) -> str:
        return import_module(".planner.html_reprs", __package__).html_of(self)
