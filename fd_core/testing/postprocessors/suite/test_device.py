"""Device: the matrix is built on the device of the tokens, without synchronization."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest

from fd_core.ops.contract import Array, Ops
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, place_of, random_rows

STEPS = [(3, 2), (6, 0), (0, 6), (0, 0), (1, 5)]
"""Numbers of rows and revoked slots, out of six slots."""
_MANY: Final = 50
"""The same of a large batch, as multiples."""


_READS: Final = tuple(
    """
    __array__ __bool__ __complex__ __float__ __index__ __int__ __dlpack__ __getitem__ __setitem__ allclose argwhere
    cpu equal equal_all get is_nonzero item masked_select nonzero numpy to tolist unique unique_consecutive where
    """.split()
)
"""Array methods and functions of all frameworks whose result or size requires synchronization with the host."""


def _indexing(array: Array, key: Any, value: Any = None) -> bool:
    """True if cells are selected by a mask, whose size must be counted, or by a scalar on the device."""
    keys = [each for each in (key if isinstance(key, tuple) else (key,)) if isinstance(each, type(array))]
    filling = value is not None and not isinstance(value, type(array))
    return any(not each.shape or ("bool" in str(each.dtype) and not filling) for each in keys)


_ONLY_IF: Final[Mapping[str, Callable[..., bool]]] = {
    "__getitem__": _indexing,
    "__setitem__": _indexing,
    "to": lambda *given, **named: "cpu" in [each for each in (*given, *named.values()) if isinstance(each, str)],
    "where": lambda *given, **named: len(given) + len(named) == 1,
}
"""Methods that synchronize only for some arguments."""


@contextmanager
def no_waiting(ops: Ops, array: Array) -> Iterator[None]:
    """Fail with rule 1 if the pack, or an array of the class of `array`, copies values to the host.

    The classes of some frameworks, such as numpy, cannot be patched: only the pack is watched then, and the values are
    on the host anyway. On CUDA, torch detects all kinds of synchronization.
    """
    framework = sys.modules[type(array).__module__.partition(".")[0]]
    with ExitStack() as stack:
        try:
            for owner, names in ((type(ops), ("to_host", "fetch")), (type(array), _READS), (framework, _READS)):
                for name in filter(partial(hasattr, owner), names):
                    refusing = _refusing(f"{owner.__name__}.{name}", getattr(owner, name), _ONLY_IF.get(name))
                    stack.enter_context(patch.object(owner, name, refusing))
        except TypeError:
            pass  # the class cannot be patched
        if getattr(array, "is_cuda", False) and (torch := sys.modules.get("torch")) is not None:
            before = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("error")
        yield


def _refusing(name: str, right: Callable[..., Any], only_if: Callable[..., bool] | None) -> Callable[..., Any]:
    def refuse(*arguments: Any, **named: Any) -> Any:
        if only_if is None or only_if(*arguments, **named):
            broken("1", f"the host synchronizes with the device in {name}")
        return right(*arguments, **named)

    return refuse


@pytest.mark.law("1")
@pytest.mark.parametrize("k", [0, 3])
def test_the_host_waits_for_nothing(target: PostprocessTarget, k: int) -> None:
    """Check steps after the first one of a shape, which may compile: of few and of many slots, and the 100th one.

    The matrix stays on the device of the tokens.
    """
    rng = np.random.default_rng(k)
    for times, (rows, revoked) in product((1, _MANY), STEPS):
        slots = 6 * times
        matrices = Matrices(target, slots, k)
        matrices.check(random_rows(rng, slots, k, rows=rows * times, revoked=revoked * times))
        step = random_rows(rng, slots, k, rows=rows * times, revoked=revoked * times)
        given = matrices.upload(step)
        with no_waiting(target.ops, given[0]):
            for _ in range(99 if times == 1 else 1):
                matrix = matrices.compute(given)
        ours, right = place_of(matrix), place_of(given[0])
        require(ours == right and matrix.dtype == given[0].dtype, "1", f"it is {matrix.dtype}, {ours}; tokens: {right}")
        matrices.compare(matrix, step)


@pytest.mark.law("1")
def test_its_own_arrays_are_on_the_device(target: PostprocessTarget) -> None:
    """Compute a step on torch's device without memory, which refuses tensors of the host as any other device does."""
    if target.ops.framework != "torch":
        lacks("arrays of this framework are on one device")
    from fd_core.ops.torch.ops import TorchOps

    matrices = Matrices(replace(target, ops=TorchOps(device="meta")), 6, 3)
    given = matrices.upload(random_rows(np.random.default_rng(1), 6, 3, rows=3, revoked=2))
    try:
        found = place_of(matrices.compute(given))
    except RuntimeError as error:  # also of kernels that have none for this device
        require(not {"cpu", "meta", "device"} <= {*re.findall("[a-z]+", f"{error}")}, "1", f"on a device: {error}")
        lacks("it does not compute on torch's device without memory")
    require(found == place_of(given[0]), "1", f"the matrix is {found}, the tokens {place_of(given[0])}")


@pytest.mark.law("1")
def test_nothing_of_a_step_is_kept(target: PostprocessTarget) -> None:
    matrices = Matrices(target, 6, 3)
    given = matrices.upload(random_rows(np.random.default_rng(1), 6, 3, rows=3, revoked=2))
    matrix = matrices.compute(given)
    try:
        left = [weakref.ref(each) for each in (matrix, *given)]
    except TypeError:
        lacks("arrays of this framework have no weak references")
    del matrix, given
    gc.collect()
    kept = sum(each() is not None for each in left)
    require(not kept, "1", f"{kept} arrays of a step are still referenced by the postprocessor")
