"""Progress of a start where there is no terminal, such as in a container, and advice about parsers."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from fd_core.cli.serving import startup
from fd_core.cli.serving.startup import choose_parsers, startup_bars


def test_each_phase_is_a_line_without_a_terminal() -> None:
    out = io.StringIO()
    with startup_bars(Console(file=out)) as bars:
        bars("prepare", 0, 1)
        bars("prepare", 1, 1)
        for done in range(5):
            bars("load", done, 4)
        bars.start("Downloading smollm2", 98_000_000)
    assert out.getvalue().splitlines() == ["Preparing kernels", "Loading weights", "Downloading smollm2"]


def test_phase_that_lasts_is_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_SECONDS_BETWEEN_LINES", 0.01)
    out = io.StringIO()
    with startup_bars(Console(file=out)) as bars:
        bars("prepare", 1, 1)
        bars("load", 3_000_000, 9_000_000)
        deadline = time.monotonic() + 60
        while "Loading weights: 3 of 9 MB after " not in out.getvalue():
            assert time.monotonic() < deadline, out.getvalue()
            time.sleep(0.01)
    assert "Preparing kernels:" not in out.getvalue(), "it has ended"


def test_model_without_a_template_gets_no_advice_about_parsers() -> None:
    chosen = choose_parsers("auto", "auto", None, "LlamaForCausalLM")
    assert (chosen.tools, chosen.reasoning) == ("none", "none")
