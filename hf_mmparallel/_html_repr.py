"""What notebooks show of plans and steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class HtmlRepr:
    """Base of what draws itself in a notebook, and is some lines of text in IPython's terminal."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._repr_pretty_ = HtmlRepr._repr_pretty_  # IPython prefers a class's own `__repr__` to what it inherits

    def _repr_html_(self) -> str:
        return _shown_by("html_of")(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # a notebook stores the text as well, and the whole of a prediction is megabytes
        printer.text("\n".join(f"{label}: {text}" for label, text in _shown_by("facts_of")(self)))


def _shown_by(name: str) -> Any:
    """A function that is loaded when something is shown."""
    return getattr(import_module(".planning.html_reprs", __package__), name)
