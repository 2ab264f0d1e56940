"""The environment in which untrusted templates run: Jinja's sandbox, with everything charged to a budget.

Jinja's own sandbox keeps a template away from Python's internals and from changing its input. It does not prevent a
template from looping for hours or from filling the memory. Here filters, tests and methods are restricted to a list,
each charged for the data it reads and creates; operators, loops, calls and output likewise. Operands that multiply a
size (a factor, a width, a separator) are checked first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, Final

from jinja2 import nodes, pass_context, pass_environment, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from fd_core.text.template_budget import (
    MAX_CHARS,
    MAX_ITEMS,
    TemplateLimitError,
    charge_items,
    charge_operand,
    charge_steps,
    charge_value,
    check_integer,
    check_items,
    check_size,
    joined,
    shown_text,
    the_budget,
)

_CALL_STEPS: Final = 10
_NODES_A_STEP: Final = 6
_MAX_NODES: Final = 10_000
"""Python compiles a template in one operation, for about 0.1 s at this size; published templates have under 1,000."""
_NODES_A_FUNCTION: Final = 10
_MAX_WIDTH: Final = 10_000
_MAX_SLOW_CHARS: Final = 100_000
"""Limit for operations character by character, or by a regular expression."""
_MAX_DIGITS: Final = 100
_WIDE: Final = re.compile(r"\d{5,}")

_TEXT_FILTERS: Final = ("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "trim", "upper")
_SLOW_FILTERS: Final = ("striptags", "title", "truncate", "urlencode", "wordcount")
_ORDERING_FILTERS: Final = ("dictsort", "groupby", "max", "min", "sort", "unique")
_LAZY_FILTERS: Final = ("map", "reject", "rejectattr", "select", "selectattr")
_CHEAP_FILTERS: Final = tuple("abs attr count d default filesizeformat first last length random".split())
_WALKING_TESTS: Final = tuple(
    """
    != < <= == > >= eq equalto ne lt lessthan le gt greaterthan ge in divisibleby lower upper
    """.split()
)
_STR_METHODS: Final = frozenset(
    """
    capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill
    """.split()
)
_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, _STR_METHODS),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
)
# Names that no template can spell.
_CONCAT, _COUNTED, _MADE, _OPERAND, _SPEND = "#concat", "#counted", "#made", "#operand", "#spend"


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja with Hugging Face's options, filters and tags, and nothing unbounded; for use within `metered`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,
            finalize=shown_text,
        )
        theirs: dict[str, Any] = self.filters
        self.filters = {name: theirs[name] for name in _CHEAP_FILTERS}
        self.filters |= {name: _on_text(theirs[name], MAX_CHARS) for name in _TEXT_FILTERS}
        self.filters |= {name: _on_text(theirs[name], _MAX_SLOW_CHARS) for name in _SLOW_FILTERS}
        self.filters |= {name: _ordering(theirs[name]) for name in _ORDERING_FILTERS}
        self.filters |= {name: _lazy(theirs[name]) for name in _LAZY_FILTERS}
        self.filters |= {name: _walking(theirs[name]) for name in ("float", "int")}
        self.filters |= {"fromjson": _fromjson, "indent": _indent, "items": _items}
        self.filters |= {"join": _join, "list": _list, "replace": _replace}
        self.filters |= {"reverse": _reverse, "round": _rounding(theirs["round"]), "tojson": _tojson}
        self.filters |= {_CONCAT: _join, _COUNTED: charge_items, _MADE: charge_value}
        self.filters |= {_OPERAND: charge_operand, _SPEND: charge_steps}
        tests: dict[str, Any] = self.tests
        self.tests |= {name: _walking(tests[name]) for name in _WALKING_TESTS}
        self.globals = {name: self.globals[name] for name in ("range", "namespace", "dict")}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _check_nodes(tree)
        _Meter().visit(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator unless its result would be too large."""
        if operator == "%" and isinstance(left, str | bytes):
            raise TemplateLimitError("formatting with % is not allowed")
        for value in (left, right):
            if isinstance(value, int):
                check_integer(value)
        if operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 0
            if not bits * (abs(right) if isinstance(right, int | float) else 0) <= 4096:  # so NaN is too large
                raise TemplateLimitError("a power is too large")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_growth(value, len(value) * max(0, times))
        if operator == "+" and isinstance(left, str | list | tuple):
            _check_growth(left, len(left) + _length(right))
        return the_budget().made(super().call_binop(context, operator, left, right=right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item; a tuple as a key is charged for."""
        if isinstance(argument, tuple):
            _check_width(the_budget().weigh(argument))
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's signature: a template's keyword arguments must not collide
        """Call a function that the sandbox allows, within the budget."""
        budget = the_budget()
        budget.spend(_CALL_STEPS + len(args) + len(kwargs))
        if isinstance(__obj, Macro | BlockReference):
            return super().call(__context, __obj, *args, **kwargs)
        weight = sum(map(budget.weigh, (*args, *kwargs.values())))
        # jinja wraps str.format in a separate function
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), str(getattr(method, "__name__", ""))
        for kind, allowed in _METHODS:
            if isinstance(owner, kind):
                if name not in allowed:
                    raise SecurityError(f"the method {name[:40]!r} is not allowed")
                break
        else:
            if isinstance(method, BuiltinMethodType) or not isinstance(
                method, FunctionType | MethodType | type | LoopContext | Undefined
            ):
                raise SecurityError("it calls an object that is not a function")
        if isinstance(owner, str):
            budget.weigh(owner)
            _check_str_call(owner, name, args, kwargs=kwargs, weight=weight)
        elif isinstance(owner, list | tuple):
            budget.weigh(owner)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Meter(NodeTransformer):
    """Routes syntax of templates through filters that enforce the limits."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor looks methods up by node name
        cost = _cost(node.body)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED, nodes.Const(cost))
        if node.recursive:
            # Inner levels get their values past `iter`.
            node.body.insert(0, _charge(cost, node.lineno))
            if node.test is not None:
                node.test = nodes.And(_filtered(nodes.Const(1), _SPEND), node.test, lineno=node.lineno)
        return node

    def _charged(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        cost = _cost(node.body)
        self.generic_visit(node)
        node.body.insert(0, _charge(cost, node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _charged  # noqa: N815 - as above

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - as above
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802 - as above
        self.generic_visit(node)
        node.expr = _operand_of(node.expr)
        for operand in node.ops:
            operand.expr = _operand_of(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802 - as above
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802 - as above
        self.generic_visit(node)
        node.key = _operand_of(node.key)
        return node


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _operand_of(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, _OPERAND)


def _charge(cost: int, line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filtered(nodes.Const(cost, lineno=line), _SPEND), lineno=line)


def _cost(body: Iterable[nodes.Node]) -> int:
    """Return the steps of one pass of a body, without the bodies of loops in it, which are charged separately."""
    count = 0
    for node in _nodes(body, into_loops=False):
        count += 1
        if isinstance(node, nodes.TemplateData):
            count += len(node.data) // 256
    return 1 + count // _NODES_A_STEP


def _check_nodes(tree: nodes.Template) -> None:
    """Raise `TemplateLimitError` for a template that takes long to compile."""
    left = _MAX_NODES
    for node in _nodes([tree]):
        left -= _NODES_A_FUNCTION if isinstance(node, nodes.Block | nodes.CallBlock | nodes.Macro) else 1
        if left < 0:
            raise TemplateLimitError(f"it has more than {_MAX_NODES} expressions and statements")


def _nodes(body: Iterable[nodes.Node], into_loops: bool = True) -> Iterator[nodes.Node]:
    """Yield nodes and those in them, of a loop only its iterable unless `into_loops`."""
    waiting = list(body)
    while waiting:
        yield (node := waiting.pop())
        if into_loops or not isinstance(node, nodes.For):
            waiting.extend(node.iter_child_nodes())
        else:
            waiting.append(node.iter)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what a model is trained on; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Filters and tests. Each takes the context, so that none is computed while a template is compiled.


_CONTEXT, _EVAL_CONTEXT, _ENVIRONMENT = (
    mark(lambda *_: None).jinja_pass_arg  # type: ignore[attr-defined]
    for mark in (pass_context, pass_eval_context, pass_environment)
)
"""Marks that jinja's public decorators leave on a function."""


def _passing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of jinja's filters or tests as a function whose first argument is the context."""
    wants = getattr(function, "jinja_pass_arg", None)
    if wants == _CONTEXT:
        return function
    if wants == _EVAL_CONTEXT:
        return lambda context, *args, **kwargs: function(context.eval_ctx, *args, **kwargs)
    if wants == _ENVIRONMENT:
        return lambda context, *args, **kwargs: function(context.environment, *args, **kwargs)
    return lambda context, *args, **kwargs: function(*args, **kwargs)


def _walking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Charge for all of each argument, and for the result."""
    inner = _passing(function)

    @pass_context
    def walking(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = the_budget()
        given = [budget.listed(each) if isinstance(each, Iterator) else each for each in (value, *args)]
        for each in (*given, *kwargs.values()):
            budget.weigh(each)
        return budget.made(inner(context, *given, **kwargs))

    return walking


def _on_text(function: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """Charge for a filter of a text, of at most `limit` characters."""
    inner = _walking(function)

    @pass_context
    def on_text(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        text = the_budget().text(value)
        if len(text) > limit:
            raise TemplateLimitError(f"the input of a filter has more than {limit} characters")
        if limit < MAX_CHARS:
            the_budget().spend(len(text) // 4)
        return inner(context, text, *args, **kwargs)

    return on_text


def _ordering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Charge for a filter that compares the items of its input with each other."""
    inner = _walking(function)

    @pass_context
    def ordering(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = the_budget()
        if isinstance(value, str | Iterator):
            value = budget.listed(value)
        budget.spend(budget.weigh(value) // 4 * _length(value).bit_length())
        result = inner(context, value, *args, **kwargs)
        return budget.listed(result) if isinstance(result, Iterator) else result

    return ordering


def _lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Charge for each item that a filter takes from its input."""
    inner = _passing(function)

    @pass_context
    def lazy(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = the_budget()
        return inner(context, budget.counted(value, _CALL_STEPS) if value else value, *args, **kwargs)

    return lazy


def _rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    inner = _walking(function)

    @pass_context
    def rounding(context: Context, value: Any, precision: int = 0, method: str = "common") -> Any:
        if not -_MAX_DIGITS <= precision <= _MAX_DIGITS:
            raise TemplateLimitError(f"rounding to more than {_MAX_DIGITS} digits")
        return inner(context, value, precision, method)

    return rounding


@pass_context
def _list(context: Context, value: Iterable[Any]) -> list[Any]:
    return the_budget().listed(value)


@pass_context
def _items(context: Context, value: Any) -> Iterator[Any]:
    if isinstance(value, Undefined):
        return iter(())
    if not isinstance(value, Mapping):
        raise TypeError("can only get item pairs from a mapping")
    return the_budget().counted(value.items())


@pass_context
def _reverse(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        return the_budget().made(value[::-1])
    return the_budget().listed(value)[::-1]


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face's templates expect it: not escaped for HTML, with literal non-ASCII characters."""
    _check_width(indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Each piece passes a generator for each level of the value.
    return joined(the_budget().counted(encoder.iterencode(value), 3))


@pass_context
def _fromjson(context: Context, value: Any) -> Any:
    """Parse JSON text; other values are already parsed."""
    if not isinstance(value, str):
        return value
    budget = the_budget()
    if budget.weigh(value) > _MAX_SLOW_CHARS:
        raise TemplateLimitError(f"the input of a filter has more than {_MAX_SLOW_CHARS} characters")
    check_items(value.count("{") + value.count("["))
    budget.make(16 * len(value))
    parsed = json.loads(value)
    if "\\u" in value:
        json.dumps(parsed, ensure_ascii=False).encode()  # a lone surrogate cannot be tokenized
    return budget.made(parsed)


@pass_context
def _join(context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    text = the_budget().text
    return joined((text(_attribute(item, attribute)) for item in value), text(d))


def _attribute(item: Any, attribute: str | int | None) -> Any:
    if attribute is None:
        return item
    return item.get(attribute, "") if isinstance(item, Mapping) else item[attribute]


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    budget = the_budget()
    text, before, after = budget.text(s), budget.text(old), budget.text(new)
    budget.weigh(text)
    _check_str_call(text, "replace", (before, after), kwargs={}, weight=0)
    return budget.made(text.replace(before, after, -1 if count is None else count))  # type: ignore[no-any-return]


@pass_context
def _indent(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget = the_budget()
    _check_width(width)
    margin = " " * width if isinstance(width, int) else budget.text(width)
    text = budget.text(s)
    budget.weigh(text)
    _check_str_call(text, "splitlines", (), kwargs={}, weight=0)
    lines = text.splitlines() or [""]
    check_size(len(text) + len(margin) * len(lines))
    indented = [margin + line if (blank or line) and (first or index) else line for index, line in enumerate(lines)]
    return budget.made("\n".join(indented))  # type: ignore[no-any-return]


def _check_str_call(owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], weight: int) -> None:
    """Raise `TemplateLimitError` for a method that would make too much; `weight` is that of its arguments."""
    budget = the_budget()
    if name in ("format", "format_map"):
        if _WIDE.search(owner):
            raise TemplateLimitError("a format width is too large")
        fields = owner.count("{")
        budget.spend(fields)
        check_size(len(owner) + fields * (weight + _MAX_WIDTH))
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "format"):
        for value in (*args, *kwargs.values()):
            _check_width(value)
    if name == "expandtabs":
        check_size(len(owner) + owner.count("\t") * _MAX_WIDTH)
    if name == "replace" and len(args) >= 2:
        old, new = args[0], args[1]
        if isinstance(old, str) and isinstance(new, str):
            check_size(len(owner) + owner.count(old) * len(new))
    if name == "join" and args:
        if not isinstance(args[0], str | list | tuple | dict):
            raise TemplateLimitError("the argument of join is not a list")
        check_size(weight + len(owner) * len(args[0]))
    if name in ("split", "rsplit"):
        separator = args[0] if args else kwargs.get("sep")
        if isinstance(separator, str) and separator:
            check_items(owner.count(separator))
        else:
            _check_pieces(owner)
    if name == "splitlines":
        _check_pieces(owner)


def _check_pieces(text: str) -> None:
    """Raise `TemplateLimitError` for a text that may have too many words or lines, each a separate value."""
    if len(text) > 2 * MAX_ITEMS:
        the_budget().make(16 * len(text))


def _check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise TemplateLimitError(f"a width exceeds {_MAX_WIDTH}")


def _check_growth(value: str | list[Any] | tuple[Any, ...], size: int) -> None:
    if isinstance(value, str):
        check_size(size)
    else:
        check_items(size)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0
