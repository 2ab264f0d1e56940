"""What Triton's interpreter needs to be as strict as a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add products of matrices one by one, as tensor cores do for each number by itself.

    The interpreter leaves them to a library that adds in another order beside other columns, and knows no bfloat16.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = (_numbers(each, interpreter) for each in (a, b))
        total = np.zeros_like(d.data)
        for place in range(left.shape[1]):
            total += left[:, place, None].astype(total.dtype) * right[None, place].astype(total.dtype)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _numbers(operand: Any, interpreter: Any) -> Any:
    if operand.dtype.is_bf16():
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        return interpreter._convert_float(operand.data, operand.dtype, interpreter.tl.float16, None).view(np.float16)
    return operand.data


@pytest.fixture
def integers_become_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn integers into bfloat16 by their value; the interpreter takes them for its bits."""
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def create_si_to_fp(self: Any, source: Any, wanted: Any) -> Any:
        if wanted.scalar.is_bf16():
            return cast(self, cast(self, source, interpreter.tl.float32), wanted)
        return cast(self, source, wanted)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_si_to_fp", create_si_to_fp)
