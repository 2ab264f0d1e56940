"""Patches that make Triton's interpreter as strict as a device."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def hasten() -> None:
    """Have the interpreter adapt Triton's language once for a launch, not again in each function that a kernel calls.

    Every `tl.sum` is such a function: most of the time would go there. Elsewhere than in the releases whose interpreter
    works like that, nothing changes.
    """
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_inline_asm = _three_operands
    _make_shapes_once(interpreter.tl.core)
    adapt, language = getattr(interpreter, "_patch_lang", None), (interpreter.tl, interpreter.tl.core)
    if adapt is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    adapted: list[Any] = []
    imported: dict[str, list[Any]] = {}

    def once(function: Any) -> Any:
        if (mine := imported.get(function.__module__)) is None:
            mine = [each for each in function.__globals__.values() if inspect.ismodule(each) and each in language]
            imported[function.__module__] = mine
        if mine and all(each in adapted for each in mine):
            return SimpleNamespace(restore=lambda: None)
        scope, before = adapt(function), list(adapted)
        adapted.extend(mine)

        def restore() -> None:
            adapted[:] = before
            scope.restore()

        return SimpleNamespace(restore=restore)

    interpreter._patch_lang = once
    # Skip the overflow check, which would compute integer sums a second time.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


def _make_shapes_once(language: Any) -> None:
    """Have types and tensors share their shapes, which each operation would make again: a quarter of its time."""
    make_type, make_tensor = language.block_type.__init__, language.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def type_of_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *[getattr(size, "value", size) for size in shape]
        if key not in types:
            make_type(self, element, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    language.block_type.__init__, language.tensor.__init__ = type_of_block, tensor


def _three_operands(
    self: Any, code: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
) -> SimpleNamespace:
    """Interpret `lop3.b32`, the only instruction that a kernel names, by its table of eight bits."""
    from triton.runtime import interpreter

    found = re.fullmatch(r"lop3[.]b32 \$0, \$1, \$2, \$3, (0x[0-9A-F]{2});", code)
    assert found, code
    result = np.zeros_like(values[0].data)
    for row in range(8):
        if int(found[1], 16) >> row & 1:
            bits = [value.data if row >> (2 - place) & 1 else ~value.data for place, value in enumerate(values)]
            result |= bits[0] & bits[1] & bits[2]
    return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(result, values[0].dtype.scalar))


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add products of matrices one by one to the sums so far, as tensor cores do for each number by itself.

    The interpreter uses a library whose order of additions depends on the other columns, and which lacks bfloat16.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = (_numbers(each, interpreter) for each in (a, b))
        total = np.array(d.data)
        for column in range(left.shape[1]):
            total += left[:, column, None].astype(total.dtype) * right[None, column].astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _numbers(operand: Any, interpreter: Any) -> Any:
    if operand.dtype.is_bf16():
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        return interpreter._convert_float(operand.data, operand.dtype, interpreter.tl.float16, None).view(np.float16)
    return operand.data


@pytest.fixture
def integers_become_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert integers to bfloat16 by value; the interpreter reinterprets their bits."""
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def create_si_to_fp(self: Any, source: Any, wanted: Any) -> Any:
        if wanted.scalar.is_bf16():
            return cast(self, cast(self, source, interpreter.tl.float32), wanted)
        return cast(self, source, wanted)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_si_to_fp", create_si_to_fp)
