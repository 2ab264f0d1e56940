"""Coverage of a plugin: the lines and branches of its own files that no check executed, measured by coverage.py."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from fd_core.errors import ConfigError
from fd_core.plugins import PluginOffer
from fd_core.testing.kit.expected import OF_COVERAGE, ExpectedFailure

_BINARIES: Final = frozenset(
    ".a .c .cc .cpp .cu .cuh .cxx .dll .dylib .h .hip .hpp .maca .ptx .pyc .pyd .pyx .so .xpu".split()
)
_COMPILED: Final = re.compile(r"(^|\.)n?jit\b")
"""Decorators of functions that run as machine code, such as `triton.jit`."""
_INLINE: Final = (ast.IfExp, ast.BoolOp, ast.Lambda)
"""Expressions of which a part may never run although their line does."""
# `# pragma: no cover` does not count: excuses have reasons.
_SETTINGS: Final = """[run]
branch = true
parallel = true
data_file = {folder}/data
include = {include}
patch = _exit, fork
sigterm = true
disable_warnings = no-data-collected
[report]
ignore_errors = true
exclude_lines =
    if TYPE_CHECKING:
    ^\\s*(def .*: )?\\.\\.\\.$
partial_branches = (?!)
"""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive lines that no check executed, or one way of a branch that none took."""

    file: str
    lines: str
    """`40`, `40-44`, or `40->46` for the step from line 40 to line 46 or to the `exit` of the function."""
    count: int
    """Number of lines, 0 for a branch."""
    source: str
    """First line without indentation and comment."""
    excuse: str = ""
    """Line of the file of expected failures; empty if there is none."""


class PluginCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run: the code of one or several plugins that its checks executed, and that they did not."""

    plugins: str
    lines: int
    """Lines in functions: those that run when a module is imported are not checked by that."""
    gaps: list[Gap]
    invisible: list[str] = []
    """Parts that cannot be measured: binaries, compiled functions, decisions within a line."""
    unneeded: list[str] = []
    """Lines of the file of expected failures whose code was executed."""
    incomplete: str = ""
    """Reason why some tests did not run, which may execute the code in `gaps`; empty if all ran."""

    @property
    def unexcused(self) -> list[Gap]:
        return [gap for gap in self.gaps if not gap.excuse]

    def notes(self) -> list[str]:
        """Return the sentences of the report, for every format."""
        lines, branches = sum(gap.count for gap in self.unexcused), sum(not gap.count for gap in self.unexcused)
        counts = ((lines, "line", "s"), (branches, "branch", "es"))
        count = " and ".join(f"{number} {word}{plural * (number > 1)}" for number, word, plural in counts if number)
        places = "; ".join(
            f"{file} {', '.join(gap.lines for gap in self.unexcused if gap.file == file)}"
            for file in dict.fromkeys(gap.file for gap in self.unexcused)
        )
        found = f"not looked at: {count} of {self.plugins} never executed by a check: {places}"
        if not places:
            found = f"every line and branch of {self.plugins} was executed by a check, or is excused"
        excuses = dict.fromkeys(gap.excuse for gap in self.gaps if gap.excuse)
        return [
            *([f"coverage is incomplete, for {self.incomplete}"] if self.incomplete and places else []),
            f"{found} ({self.lines} lines in functions)",
            *(f"never executed, excused: {excuse}" for excuse in excuses),
            *(f"executed now: remove the line: {line}" for line in self.unneeded),
            *(f"cannot be measured: {part}" for part in self.invisible),
        ]


def measured_names(offer: PluginOffer) -> Iterator[str]:
    """Yield the distribution of a plugin, or the file of its class for one of the core and for `FILE.py:Class`."""
    module = offer.entry.target.rpartition(":")[0]
    if module.endswith(".py"):
        yield module
    elif offer.origin.distribution == "fd-core":
        yield from (f"{path}" for path in _root_of(module))
    else:
        yield offer.origin.distribution
        known = [*_roots_of(offer.origin.distribution)]
        yield from (f"{path}" for path in _root_of(module.partition(".")[0]) if path not in known)


class CoverageRun:
    """Measures the processes that start with its `environment`."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        """Prepare to measure distributions, files and folders; data are written to `folder`.

        Raises `ConfigError` for a name that is none of them.
        """
        self._names = ", ".join(dict.fromkeys(Path(name).name for name in names))
        self._roots = list(dict.fromkeys(root for name in names for root in _roots_of(name)))
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        include = ",".join(f"{root}/*" if root.is_dir() else f"{root}" for root in self._roots)
        self._settings = folder / "settings"
        self._settings.write_text(_SETTINGS.format(folder=folder, include=include))
        self.environment = {"COVERAGE_PROCESS_START": f"{self._settings}"}

    def start(self) -> None:
        """Measure this process as well, until `finish`, and its children."""
        import coverage

        os.environ.update(self.environment)
        coverage.process_startup(force=True)

    def finish(self, expected: Sequence[ExpectedFailure], incomplete: str) -> PluginCoverage:
        """Return the result of this process and its children, and delete the data."""
        import coverage

        for name in self.environment:
            del os.environ[name]
        if (running := coverage.Coverage.current()) is not None:
            running.stop()
            running.save()
        found = self.result(expected, incomplete)
        shutil.rmtree(self._folder)
        return found

    def result(self, expected: Sequence[ExpectedFailure] = (), incomplete: str = "") -> PluginCoverage:
        """Return what the processes executed that ended so far; a killed process counts as if it executed nothing."""
        import coverage

        excuses = [line for line in expected if line.pattern.startswith(OF_COVERAGE)]
        files = {path: f"{path.relative_to(root.parent)}" for root in self._roots for path in _files_of(root)}
        sources = [path for path in files if path.suffix == ".py" and path.stat().st_size]
        measured = coverage.Coverage(config_file=f"{self._settings}")
        with contextlib.suppress(coverage.exceptions.NoDataError):
            measured.combine([f"{self._folder}"], keep=True)
        report = self._folder / "report"
        measured.json_report(morfs=[f"{path}" for path in sources], outfile=f"{report}")
        found = msgspec.json.decode(report.read_bytes())["files"]
        gaps: list[Gap] = []
        lines, invisible = 0, [name for path, name in files.items() if path.suffix in _BINARIES]
        for path, each in ((Path(name).absolute(), each) for name, each in found.items()):
            text = path.read_text(encoding="utf-8")
            executed, missing = set(each["executed_lines"]), set(each["missing_lines"])
            unseen = list(_invisible(ast.parse(text), executed))
            compiled = {line for _, lines in unseen for line in lines}
            invisible += [f"{files[path]}: {what}" for what, _ in unseen]
            functions = (region for name, region in each["functions"].items() if name)
            lines += sum(len({*region["executed_lines"], *region["missing_lines"]} - compiled) for region in functions)
            branches = [(start, end) for start, end in each.get("missing_branches", ()) if end not in missing]
            for first, count, label in _gaps(executed, missing - compiled, branches):
                source = text.splitlines()[first - 1].partition(" #")[0].strip()
                name = f"{OF_COVERAGE}{files[path]}:{source}"
                excuse = next((f"{line}" for line in excuses if line.is_glob_of(name)), "")
                gaps.append(Gap(file=files[path], lines=label, count=count, source=source, excuse=excuse))
        used = {gap.excuse for gap in gaps}
        return PluginCoverage(
            plugins=self._names,
            lines=lines,
            gaps=gaps,
            invisible=invisible,
            unneeded=[f"{line}" for line in excuses if f"{line}" not in used],
            incomplete=incomplete,
        )


def _roots_of(name: str) -> Iterator[Path]:
    """Yield the files and packages of a distribution, also of one that is installed as editable, or a given path.

    Imports none of them: what runs before the measurement begins would count as never executed.
    """
    if Path(name).exists():
        yield Path(name).resolve()
        return
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        hint = "name an installed distribution, such as fd-mychip, or a file or folder"
        raise ConfigError(f"{name!r} is not installed", field="--fd-coverage", hint=hint) from None
    owned = (top for top, owners in metadata.packages_distributions().items() if distribution.name in owners)
    modules = [point.module for point in distribution.entry_points]
    for module in (*modules, *(top for top in owned if top != "tests")):
        # A namespace has no file; other distributions share it.
        yield from [*_root_of(module.partition(".")[0])] or _root_of(module)


def _root_of(module: str) -> Iterator[Path]:
    spec = find_spec(module)
    if spec is not None and spec.origin is not None:
        origin = Path(spec.origin).resolve()
        yield origin.parent if spec.submodule_search_locations else origin


def _files_of(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    for path in sorted(root.rglob("*")):
        if path.is_file() and not {"tests", "__pycache__"}.intersection(path.relative_to(root).parts):
            yield path


def _invisible(tree: ast.Module, executed: set[int]) -> Iterator[tuple[str, range]]:
    """Yield what cannot be measured of a file, with the lines that are therefore no gaps."""
    inline: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            lines = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            compiled = any(_COMPILED.search(ast.unparse(each)) for each in node.decorator_list)
            if compiled and not executed.intersection(lines):  # an interpreter of kernels executes the lines
                yield f"compiled function {node.name}", lines
        elif isinstance(node, _INLINE):
            inline.add(node.lineno)
        elif isinstance(node, ast.comprehension):
            inline.update(each.lineno for each in node.ifs)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield f"{node.func.id} in line {node.lineno}", range(0)
    if inline:
        yield f"decisions within lines {', '.join(map(str, sorted(inline)))}", range(0)


def _gaps(executed: set[int], missing: set[int], branches: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    """Yield first line, number of lines and name of each gap."""
    run: list[int] = []
    for line in [*sorted(executed | missing), 0]:
        if line in missing:
            run.append(line)
        elif run:
            yield run[0], len(run), f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}"
            run = []
    for start, end in branches:
        yield start, 0, f"{start}->{end if end > 0 else 'exit'}"
