"""Detection of tests of elapsed time in the sources.

Such a test carries `@pytest.mark.timing`. The session `tests` leaves it out of the parallel part, runs it alone
afterwards and repeats a failure once, which the summary reports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_CLOCKS = {
    *("time.monotonic", "time.perf_counter", "time.process_time", "time.thread_time", "time.time"),
    "resource.getrusage",
}


def unmarked(paths: Iterable[Path]) -> list[str]:
    """Return `file:line name` of tests that compare elapsed time with a limit and carry no marker.

    Elapsed time is a difference of clock readings, a variable that holds one, or the result of a function of these
    files that returns one. A wait loop that compares the clock with a deadline is no verdict on time.
    """
    trees = {path: ast.parse(path.read_text()) for path in paths}
    timers: dict[str, set[str]] = {_module(path): set() for path in trees}
    imports = [
        (_module(path), node.module or "", {each.name for each in node.names})
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
    ]
    helpers = [
        (_module(path), node, _reads(node))
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, _Function) and not _is_test(node)
    ]
    found = True
    while found:
        before = sum(map(len, timers.values()))
        for module, source, names in imports:
            timers[module] |= names & timers.get(source, set())
        for module, helper, reads in helpers:
            known = timers[module]
            if helper.name not in known and not reads.isdisjoint(known | {""}) and _returns_elapsed(helper, known):
                known.add(helper.name)
        found = sum(map(len, timers.values())) > before
    return [
        f"{path}:{test.lineno} {test.name}"
        for path, tree in trees.items()
        if not _marks(tree.body)
        for test in _unmarked_tests(tree.body)
        if _judges_elapsed(test, timers[_module(path)])
    ]


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def _unmarked_tests(body: list[ast.stmt]) -> Iterator[_Function]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not _is_marked(node) and not _marks(node.body):
            yield from _unmarked_tests(node.body)
        elif isinstance(node, _Function) and _is_test(node) and not _is_marked(node):
            yield node


def _is_test(function: _Function) -> bool:
    return function.name.startswith("test_")


def _is_marked(node: _Function | ast.ClassDef) -> bool:
    return any("timing" in ast.unparse(each).split(".") for each in node.decorator_list)


def _marks(body: list[ast.stmt]) -> bool:
    """Return True if a module or class marks all of its tests with `pytestmark`."""
    assigned = [node for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])]
    return any("mark.timing" in ast.unparse(node.value) for node in assigned)


def _reads(function: _Function) -> frozenset[str]:
    """Return the names in a function; an empty one stands for a clock."""
    nodes = list(ast.walk(function))
    return frozenset({*(node.id for node in nodes if isinstance(node, ast.Name)), *[""][: any(map(_is_clock, nodes))]})


def _judges_elapsed(test: _Function, timers: set[str]) -> bool:
    if _reads(test).isdisjoint(timers | {""}):
        return False
    durations = _durations(test, timers)
    return any(
        isinstance(node, ast.Compare)
        and any(isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for operator in node.ops)
        and any(_is_elapsed(each, durations, timers) for each in (node.left, *node.comparators))
        for asserted in ast.walk(test)
        if isinstance(asserted, ast.Assert)
        for node in ast.walk(asserted.test)
    )


def _returns_elapsed(function: _Function, timers: set[str]) -> bool:
    durations = _durations(function, timers)
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield) and node.value]
    return any(_is_elapsed(value, durations, timers) for value in returned)


def _durations(function: _Function, timers: set[str]) -> set[str]:
    """Return the names of variables that hold elapsed time, or a list of such times."""
    pairs = list(_assigned(function))
    readings = {name for name, value in pairs if any(_is_clock(node) for node in ast.walk(value))}
    held: set[str] = set()
    while found := {name for name, value in pairs if _is_elapsed(value, held, timers, readings)} - held:
        held |= found
    return held


def _assigned(function: _Function) -> Iterator[tuple[str, ast.expr]]:
    """Yield each variable of a function with each value that is assigned or appended to it."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from ((ast.unparse(target), value) for target, value in zip(targets, values, strict=False))
            case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
                yield ast.unparse(target), value
            case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[value]):
                yield ast.unparse(target), value


def _is_elapsed(
    value: ast.expr, durations: set[str], timers: set[str], readings: set[str] | frozenset[str] = frozenset()
) -> bool:
    for node in ast.walk(value):
        match node:
            case ast.BinOp(op=ast.Sub(), left=left) if any(
                _is_clock(each) or (isinstance(each, ast.Name) and each.id in readings) for each in ast.walk(left)
            ):
                return True
            case ast.Name() | ast.Attribute() if ast.unparse(node) in durations:
                return True
            case ast.Call(func=ast.Name(id=name)) if name in timers:
                return True
    return False


def _is_clock(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
            return f"{module}.{name}" in _CLOCKS
    return False
