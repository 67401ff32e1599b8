"""Says how far the demonstration is: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Screen:
    """Where the demonstration says what it does; a context manager.

    Parameters
    ----------
    console : Console
        Bars are drawn if it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("  {task.description:<44}"),
                BarColumn(bar_width=28),
                TextColumn("step {task.completed:>3.0f}/{task.total:.0f}  {task.fields[note]:<12}"),
                TimeElapsedColumn(),
                console=console,
            )

    def say(self, text: str) -> None:
        """Say one line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def training(self, title: str, total: int) -> TrainingBar:
        """Begin a training of `total` steps."""
        task = None if self._bars is None else self._bars.add_task(title, total=total, note="")
        return TrainingBar(self, self._bars, task, title=title, total=total)

    def __enter__(self) -> Screen:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


class TrainingBar:
    """How far one training process is."""

    def __init__(
        self, screen: Screen, bars: Progress | None, task: TaskID | None, *, title: str, total: int
    ) -> None:
        self._screen, self._bars, self._task = screen, bars, task
        self._title, self._total = title, total
        self._told = 0

    def step(self, number: int, loss: float) -> None:
        """Show the step that was done last."""
        note = f"loss {loss:.3f}"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=number, note=note)
        # Where every line stays, each fourth of the way is enough.
        elif number == self._total or number - self._told >= self._total / 4:
            self._told = number
            self._screen.say(f"  {self._title}: step {number}/{self._total}, {note}")

    def close(self) -> None:
        """Let the bar stand as it is."""
        if self._bars is not None and self._task is not None:
            self._bars.stop_task(self._task)
