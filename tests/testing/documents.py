"""Runs guides that lead to a plugin: their commands on their files, in the order of the document."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.plugin_sites import installed

ROOT = Path(__file__).parents[2]

ELSEWHERE = ("hatch build", "fdcore serve")
"""Commands that need a package index or a model, or never end."""

SERVES = """
import sys
from pathlib import Path

from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.target import parse_target
from fd_core.testing.models.texts import greedy, run

field, name, folder = sys.argv[1:]
target = parse_target("reference", Path(folder))
golden = Golden(target)
specs = [greedy(f"r{number}", range(number, number + 6), 40) for number in range(5)]
with target.engine(3, golden.whole(specs), 0.3, pipeline_depth=2, **{field: name}) as engine:
    golden.check(specs, run(engine, specs).tokens)
    stats = engine.stats().scheduler
    print(getattr(engine.info, field), stats.counters.preemptions > 0, engine.info.pipeline_depth)
"""


def follow(document: str, folder: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Follow `docs/extend/DOCUMENT` from `folder`: write its files and run its commands.

    Return the last folder, and each command with its output. Raises AssertionError if a command fails.
    """
    text = (ROOT / "docs" / "extend" / document).read_text()
    outputs: list[tuple[str, str]] = []
    for file, language, block in re.findall(r"(?:`([\w./]+)`:\n\n)?```(\w+)\n(.*?)```\n", text, re.DOTALL):
        if file:
            assert (folder / file).parent.is_dir()
            (folder / file).write_text(block)
        elif language == "sh":
            for line in block.splitlines():
                if line.startswith("cd "):
                    folder /= line.removeprefix("cd ")
                elif line.startswith("pip install -e"):
                    installed(folder)
                elif not line.startswith(ELSEWHERE):
                    outputs.append((line, run_line(folder, line)))
    return folder, outputs


def run_line(folder: Path, line: str, code: int = 0) -> str:
    """Run a command in an installed project and return its output; its exit code has to be `code`."""
    program, *arguments = shlex.split(line, comments=True)
    command = {"fdcore": [sys.executable, "-m", "fd_core.cli"], "pytest": [sys.executable, "-m", "pytest"]}
    path = os.pathsep.join([str(folder), str(ROOT)])
    # A separate folder, since left_behind of a connector lists it; its path is short for the sake of socket paths.
    with tempfile.TemporaryDirectory(prefix="fd") as temporary:
        ended = subprocess.run(
            [*command.get(program, [program]), *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "TMPDIR": temporary},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == code, f"{line}\n{ended.stdout}{ended.stderr}"
    return ended.stdout + ended.stderr


def serve(folder: Path, field: str, name: str) -> None:
    """Serve the golden texts by an engine with this setting, with preemptions and steps in flight.

    Raises AssertionError with the output if that fails.
    """
    output = run_line(folder, shlex.join([sys.executable, "-c", SERVES, field, name, str(folder / "checkpoint")]))
    # Log lines follow, for example that a model without a tokenizer does not support some requests.
    assert output.startswith(f"{name} True 2\n"), output


def passed(output: str) -> int:
    """Return the number of passed tests in pytest's last line."""
    return int(re.findall(r"(\d+) passed", output)[-1])
