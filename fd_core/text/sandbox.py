"""The environment in which untrusted templates run: Jinja's sandbox, with limits on steps and on growth.

Jinja's own sandbox keeps a template away from Python's internals and from changing its input. It does not keep it
from looping for hours or from filling the memory, so here each loop step and each call spends from a budget, and
what can build a large value from small ones is checked before it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["MAX_CHARS", "MAX_STEPS", "Sandbox", "TemplateBudget", "TooMuch", "joined"]

MAX_CHARS = 16 << 20
"""Limit for the characters of a rendered prompt, and of any value that a template computes."""

MAX_STEPS = 2_000_000
"""Limit for the steps of one rendering: each pass of a loop is one step, each call ten."""

BUDGET = "#budget"
"""Name of the budget in the context of a rendering; no template can spell it."""

_CALL_STEPS = 10
_MAX_ITEMS = 1_000_000
_MAX_WIDTH = 10_000
_MAX_BITS = 4096
_WIDE = re.compile(r"\d{5,}")


class TooMuch(Exception):
    """The template would take more steps or characters than the limits allow."""


class TemplateBudget:
    """The steps that one rendering may still take."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        """Take steps. Raises `TooMuch` when none is left."""
        self._left -= steps
        if self._left < 0:
            raise TooMuch(f"it takes more than {MAX_STEPS} steps")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for chat templates: Hugging Face's options, filters and tags, and nothing that is unbounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        for name in _UNBOUNDED_FILTERS:
            self.filters.pop(name, None)
        self.filters.update(tojson=_tojson, join=_join, replace=_replace, indent=_indent)
        self.filters[_COUNTED] = _counted
        self.filters[_CONCAT] = _join
        self.globals = {name: self.globals[name] for name in ("range", "namespace", "dict")}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Meter().visit(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator unless its result would be too large."""
        if operator == "%" and isinstance(left, str | bytes):
            raise TooMuch("formatting with % is not allowed")
        if operator == "**" and not (_bits(left) * _magnitude(right) <= _MAX_BITS):
            raise TooMuch("a power is too large")
        if operator == "*":
            _check_product(left, right)
        if operator == "+" and isinstance(left, str | bytes | list | tuple):
            _check_growth(left, len(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's signature: a template's keyword arguments must not collide
        """Call a function that the sandbox allows, within the budget."""
        __context.parent[BUDGET].spend(_CALL_STEPS)
        # jinja wraps str.format in a function of its own
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_str_call(owner, getattr(method, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


# Filters that multiply their input's size, or that no chat template has a use for.
_UNBOUNDED_FILTERS = ("batch", "center", "format", "pprint", "slice", "sum", "urlize", "wordwrap", "xmlattr")
_COUNTED = "#counted"
_CONCAT = "#concat"


class _Meter(NodeTransformer):
    """Puts the iterable of every loop and every `~` behind a filter that keeps to the limits."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor looks methods up by node name
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - as above
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _CONCAT, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what a model is trained on; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget: TemplateBudget = context.parent[BUDGET]
    for value in values:
        budget.spend()
        yield value


def joined(pieces: Iterable[str]) -> str:
    """Return the pieces as one text. Raises `TooMuch` as soon as it would be too large."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        kept.append(piece)
    return "".join(kept)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face's templates expect it: not escaped for HTML, non-ASCII characters as they are."""
    _check_width(indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return joined(encoder.iterencode(value))


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    texts = [str(_attribute(item, attribute)) for item in value]
    _check_size(sum(map(len, texts)) + len(str(d)) * len(texts))
    return str(d).join(texts)


def _attribute(item: Any, attribute: str | int | None) -> Any:
    if attribute is None:
        return item
    return item.get(attribute, "") if isinstance(item, Mapping) else item[attribute]


def _replace(s: str, old: str, new: str, count: int = -1) -> str:
    text = str(s)
    _check_str_call(text, "replace", (str(old), str(new)), {})
    return text.replace(str(old), str(new), -1 if count is None else count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int):
        _check_width(width)
    margin = " " * width if isinstance(width, int) else str(width)
    lines = str(s).splitlines() or [""]
    _check_size(len(str(s)) + len(margin) * len(lines))
    indented = [margin + line if (blank or line) and (first or index) else line for index, line in enumerate(lines)]
    return "\n".join(indented)


def _check_str_call(owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name in ("format", "format_map") and _WIDE.search(owner):
        raise TooMuch("a format is too wide")
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "format"):
        for value in (*args, *kwargs.values()):
            _check_width(value)
    if name == "replace" and len(args) >= 2:
        old, new = args[0], args[1]
        if isinstance(old, str) and isinstance(new, str):
            _check_size(len(owner) + owner.count(old) * len(new))
    if name == "join" and args and isinstance(args[0], list | tuple):
        _check_size(sum(_length(item) + len(owner) for item in args[0]))


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            _check_growth(value, len(value) * max(0, times))
    if _bits(left) + _bits(right) > _MAX_BITS:
        raise TooMuch("a number is too large")


def _check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise TooMuch(f"a width is beyond {_MAX_WIDTH}")


def _check_growth(value: str | bytes | list[Any] | tuple[Any, ...], size: int) -> None:
    if isinstance(value, list | tuple) and size > _MAX_ITEMS:
        raise TooMuch(f"a list has more than {_MAX_ITEMS} items")
    _check_size(size)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TooMuch(f"a value has more than {MAX_CHARS} characters")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _magnitude(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else 0
