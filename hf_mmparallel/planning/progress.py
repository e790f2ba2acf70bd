"""What a command is doing, on stderr: a bar from its first second where that is a terminal, else a line a phase."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Phases:
    """The phases of a command, shown until they are done or the context is left."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=self.console, transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *error: object) -> None:
        self.done()

    def begin(self, text: str, is_short: bool = False) -> None:
        """Names the phase that begins; without a terminal a short one is not worth a line."""
        if self.console.is_terminal:
            self._bar.start()
            self._bar.update(self._task, total=None, completed=0.0, description=text)
        elif not is_short:
            self.console.print(text, highlight=False, soft_wrap=True)

    def advance(self, share: float) -> None:
        """Adds a share of the phase to what is done of it."""
        self._bar.update(self._task, total=1.0, advance=share)

    def done(self) -> None:
        """Takes the bar off the screen, for what is printed next."""
        if self.console.is_terminal:  # elsewhere it would write an empty line
            self._bar.stop()
