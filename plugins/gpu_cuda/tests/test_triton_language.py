"""Kernels use only features of all supported Triton releases; only the newest release runs here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[1] / "fd_gpu_cuda/kernels").glob("*.py"))


def compiled_functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a file that Triton compiles."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(each) for each in node.decorator_list]
            if any(each == "triton.jit" or each.startswith("kernel") for each in decorators):
                yield node


def too_new(function: ast.FunctionDef) -> list[str]:
    """Return the code that an old release does not compile.

    Triton 3.2: `and` or `or` between more than two, and chained comparisons. 3.3: numbers that Python knows among the
    values that are assigned at once.
    """
    return [
        f"{function.name}, line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(function)
        if (isinstance(node, ast.BoolOp) and len(node.values) > 2)
        or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and any(map(is_number, node.value.elts)))
    ]


def is_number(value: ast.expr) -> bool:
    """Return True if the number is known before Triton compiles."""
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and ast.unparse(value.func) == "float")


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_need_no_newer_language_than_the_oldest_release(path: Path) -> None:
    assert not [each for function in compiled_functions(path) for each in too_new(function)]


def test_kernels_are_found_at_all() -> None:
    assert sum(1 for path in KERNELS for _ in compiled_functions(path)) > 30
