from __future__ import annotations

import io

from rich.console import Console

from fastcheck_dask.demo.progress import Screen


def told(*, terminal: bool) -> str:
    text = io.StringIO()
    with Screen(Console(file=text, force_terminal=terminal, width=120)) as screen:
        screen.say("[red]begins[/]")
        bar = screen.training("VGG-like: without failures", 8)
        for step in range(1, 9):
            bar.step(step, 1 / step)
        bar.close()
    return text.getvalue()


def test_screen_without_terminal_says_plain_lines_now_and_then():
    assert told(terminal=False).splitlines() == [
        "begins",
        *(f"  VGG-like: without failures: step {step}/8, loss {1 / step:.3f}" for step in (2, 4, 6, 8)),
    ]


def test_screen_terminal_draws_a_bar_to_the_end():
    text = told(terminal=True)
    assert "\x1b[" in text
    assert "begins" in text
    assert "8/8" in text
    assert "loss 0.125" in text
