"""Two tools for an agent: a calculator, and a clock that is passed in, so that a test can fix it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

Tool = Callable[..., str]
OPERATORS: Mapping[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
"""No powers: 9 ** 9 ** 9 would never finish."""

DESCRIPTIONS = (
    {
        "name": "calculate",
        "description": "Compute an expression of numbers, + - * / and brackets.",
        "schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
    {
        "name": "time_now",
        "description": "Return date and time, so many hours east of Greenwich.",
        "schema": {
            "type": "object",
            "properties": {"hours_east": {"type": "number", "minimum": -12, "maximum": 14}},
            "required": ["hours_east"],
            "additionalProperties": False,
        },
    },
)


def make_tools(clock: Callable[[], datetime]) -> Mapping[str, Tool]:
    """Return the tools by name; `clock` returns the time in UTC."""

    def time_now(hours_east: float) -> str:
        return f"{clock() + timedelta(hours=hours_east):%A, %d %B %Y, %H:%M}"

    return {
        "calculate": lambda expression: f"{_value(ast.parse(expression, mode='eval').body):.12g}",
        "time_now": time_now,
    }


def call(tools: Mapping[str, Tool], name: str, arguments: Any) -> tuple[str, bool]:
    """Return the output of a tool, and True if it failed: the model reads the error and may retry."""
    try:
        return tools[name](**arguments), False
    except Exception as error:  # noqa: BLE001 - any error of a tool goes to the model and must not end the agent
        return f"{type(error).__name__}: {error}", True


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(sign, operand) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(operand))
    raise ValueError(f"not a number, + - * / or a bracket: {ast.unparse(node)}")
