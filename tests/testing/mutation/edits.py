"""Small edits of a module: a constant, comparison, operator, dtype, order of two, a statement, a copy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_OPERATORS: Final = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"), ast.Pow: ("**", "*"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_NAMES: Final = {
    "float64": "float32", "float32": "float16", "int64": "int32", "int32": "int16", "int16": "int8",
    "uint64": "uint32", "uint32": "uint16", "uint16": "uint8", "max": "min", "min": "max", "any": "all", "all": "any",
    "maximum": "minimum", "minimum": "maximum", "argmax": "argmin", "zeros": "ones", "ones": "zeros",
    "appendleft": "append", "popleft": "pop", "floor": "ceil", "startswith": "endswith", "lstrip": "strip",
    "rstrip": "strip", "find": "rfind", "rfind": "find",
}  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """Replacement of one span of a source text."""

    start: int
    end: int
    text: str
    line: int

    def applied(self, source: str) -> str:
        """Return the source with the edit."""
        return source[: self.start] + self.text + source[self.end :]

    def describe(self, source: str) -> str:
        """Return the line with the edit, as `old line => new line`."""
        begin, end = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.end)
        old = " ".join(source[begin:end].split())
        new = " ".join((source[begin : self.start] + self.text + source[self.end : end]).split())
        return f"{old} => {new}"


def edits_of(source: str) -> list[Edit]:
    """Return every edit of a module in the order of the text, none in annotations or errors."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    data = source.encode()

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
        return len(data[:first].decode()), len(data[:last].decode())

    found = [
        Edit(start, end, text, node.lineno)
        for node in _executed(ast.parse(source))
        for start, end, text in _edits_at(node, source, span)
    ]
    return sorted(set(found), key=lambda edit: (edit.start, edit.end, edit.text))


def _executed(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield statements and expressions below a node that decide what a plugin does."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    skipped: tuple[ast.AST | None, ...] = ()
    if isinstance(node, ast.AnnAssign):
        skipped = (node.annotation,)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped = (node.args, node.returns, *node.decorator_list)
    elif isinstance(node, ast.ClassDef):
        skipped = (*node.bases, *node.keywords, *node.decorator_list)
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _executed(child)


def _edits_at(node: ast.AST, source: str, span: object) -> Iterator[tuple[int, int, str]]:
    assert callable(span)
    match node:
        case ast.Constant(value=bool() as value):
            yield *span(node), str(not value)
        case ast.Constant(value=int() as number):
            yield *span(node), str(number + 1)
            if number > 0:
                yield *span(node), str(number - 1)
        case ast.Constant(value=float() as number):
            yield *span(node), repr(number * 1.1 if number else 0.1)
        case (
            ast.Compare(left=left, ops=[operator], comparators=[right]) | ast.BinOp(left=left, op=operator, right=right)
        ):
            yield from _other_operator(operator, span(left)[1], span(right)[0], source)
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            yield from _other_operator(operator, span(left)[1], span(right)[0], source)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield *span(node), f"bool(({source[slice(*span(operand))]}))"
        case ast.IfExp(body=body, orelse=other):
            yield *span(node), f"({source[slice(*span(body))]})"
            yield *span(node), f"({source[slice(*span(other))]})"
        case ast.Call(func=ast.Attribute(value=value, attr="copy"), args=[]):
            yield *span(node), source[slice(*span(value))]
        case ast.Attribute(attr=name) if name in _NAMES:
            yield span(node)[1] - len(name), span(node)[1], _NAMES[name]
        case ast.Name(id=name) if name in _NAMES:
            yield *span(node), _NAMES[name]
        case ast.AugAssign(target=target, op=operator, value=value):
            yield from _other_operator(operator, span(target)[1], span(value)[0], source)
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Continue() | ast.Break():
            yield *span(node), "pass"


def _other_operator(operator: ast.AST, start: int, end: int, source: str) -> Iterator[tuple[int, int, str]]:
    """Yield the replacement of an operator between the end of its left and the start of its right side."""
    if type(operator) in _OPERATORS:
        old, new = _OPERATORS[type(operator)]
        yield start, end, source[start:end].replace(old, new, 1)
