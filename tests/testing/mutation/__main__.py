"""Try a sample of the edits of the plugins of each kind, and list those that the kit does not detect."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

from fd_core.cli.plugins.scaffold import Framework, PluginKind, project
from tests.testing.mutation.edits import Edit, edits_of
from tests.testing.mutation.finder import path_of
from tests.testing.mutation.subjects import SUBJECTS, offered
from tests.testing.mutation.trial import outcome

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
"""Edits that change nothing that the contract promises: `module: old line => new line  # reason`."""


def main() -> int:
    """Run the command; return 1 if fewer than 95 of 100 edits of a kind are detected."""
    parser = argparse.ArgumentParser(prog="python -m tests.testing.mutation", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"all by default: {', '.join(SUBJECTS)}")
    parser.add_argument("--count", type=int, default=100, help="number of edits of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one run of the kit")
    parser.add_argument("--only", default="", help="edits whose description contains this text")
    options = parser.parse_args()
    results = [detects(PluginKind(kind), options) for kind in options.kinds or SUBJECTS]
    return 0 if all(results) else 1


def detects(kind: PluginKind, options: argparse.Namespace) -> bool:
    """Try edits of the plugins of one kind; return False if the kit detects fewer than 95 of 100."""
    subject = SUBJECTS[kind]
    known = {line.partition("  # ")[0] for line in EQUIVALENT.read_text().splitlines() if line}
    sources = {module: path_of(module).read_text() for module in subject.modules}
    every = [(module, edit) for module, source in sources.items() for edit in edits_of(source)]

    def described(module: str, edit: Edit) -> str:
        return f"{module}: {edit.describe(sources[module])}"

    wanted = [each for each in every if options.only in described(*each) and described(*each) not in known]
    random.Random(options.seed).shuffle(wanted)
    chosen, counts, started = wanted[: options.count], Counter[str](), time.monotonic()
    known_or_not = len(every) - len(wanted)
    print(f"{kind}: {len(chosen)} of {len(every)} edits, {known_or_not} known as equivalent or not wanted", flush=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name)
        prepare(folder, kind)
        for module in dict.fromkeys(module for module, _ in chosen):
            runs = [*subject.runs_for(module)[:1], *filter(None, [subject.tests])]
            right = outcome(module, None, runs, folder=folder, seconds=3 * options.seconds)
            if right != "survives":
                print(f"the kit fails for {module} without an edit ({right}):\n{last_output(folder)}")
                return False

        def tried(each: tuple[str, Edit]) -> str:
            found = outcome(*each, subject.runs_for(each[0]), folder=folder, seconds=options.seconds)
            if found != "survives" or not subject.tests:
                return found
            found = outcome(*each, (subject.tests,), folder=folder, seconds=options.seconds)
            return "left to the plugin" if found in ("killed", "hangs") else found

        for each, found in zip(chosen, pool.map(tried, chosen), strict=True):
            counts[found] += 1
            if found != "killed":
                print(f"{found}: {described(*each)} (line {each[1].line})", flush=True)
    loaded = len(chosen) - counts["does not load"] - counts["left to the plugin"]
    detected = counts["killed"] + counts["hangs"]
    print(f"{kind}: {detected} of {loaded} detected, {dict(counts)}, {time.monotonic() - started:.0f} s", flush=True)
    return detected >= 0.95 * loaded


def prepare(folder: Path, kind: PluginKind) -> None:
    """Write the tests of the plugins and the backend `mutant` to a folder, and import what no edit changes."""
    import hypothesis  # noqa: F401
    import msgspec  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "sitecustomize.py").write_text("from tests.testing.mutation.finder import install\n\ninstall()\n")
    template = resources.files(project.__package__).joinpath(f"templates/tests/test_{project.test_of(kind)}.py.tmpl")
    for plugin in offered(kind):
        words = project._words(plugin, kind, Framework.NUMPY)
        (folder / f"test_{plugin}.py").write_text(project._filled(template.read_text(), words))
    info = folder / "fd_mutant_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-mutant-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fd_core]\nmutant = tests.testing.mutation.backend\n")


def last_output(folder: Path) -> str:
    """Return the end of the output of the last run."""
    last = max(folder.glob("output*"), key=lambda path: path.stat().st_mtime)
    return last.read_text(errors="replace")[-3000:]


if __name__ == "__main__":
    sys.exit(main())
