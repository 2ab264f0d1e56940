"""The notebook of the simulator runs from its first cell to its last, and is kept without outputs."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.examples.conftest import EXAMPLES

NOTEBOOK = EXAMPLES / "notebook" / "simulator.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_notebook_is_stored_without_outputs() -> None:
    assert CELLS
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)


def test_every_cell_runs_and_the_shortest_are_served_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells that plot run where matplotlib is, as in `nox -s notebook`."""
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("MPLBACKEND", "agg")
    plots = importlib.util.find_spec("matplotlib") is not None
    names: dict[str, Any] = {}
    for cell in CELLS:
        if plots or "plot" not in cell["metadata"].get("tags", ()):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}:{cell['id']}", "exec"), names)
    fcfs, shortest = (run["figures"]["latencies"]["ttft"] for run in names["runs"].values())
    # The claims of the text next to the tables.
    assert shortest["mean"] < fcfs["mean"] and shortest["p99"] > fcfs["p99"]
    assert "slot" in capsys.readouterr().out
    if plots:
        assert [line.get_label() for line in names["axes"].get_lines()] == list(names["runs"])
