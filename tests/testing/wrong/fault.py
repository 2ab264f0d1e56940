"""A wrong backend: a few lines on top of the pack or the postprocessor of a right one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fd_core.backends.cpu import ReferenceBackend
from fd_core.backends.null import NullBackend
from fd_core.ops.contract import DESCRIBED_BY
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess

FAULTS: dict[str, Fault] = {}
WHOLE_MODELS = ("ranks:*", "models:test_models_take_turns_on_one_pack", "models:test_ropes_of_every_kind")
"""Tests of whole models, in which many faults show."""
ANSWERED = "signals:test_each_slot_of_random_plans_is_answered*"
IN_ENGINES = ("budget:*", "kv:*", "signals:*")
"""Sections with engines, in which faults of all steps show."""
BASES = {"null": NullBackend, "reference": ReferenceBackend}


@dataclass(frozen=True)
class Fault:
    """A wrong backend, the tests that have to detect it, and those that may fail too, as `section:test[numbers]`."""

    name: str
    backend: type
    postprocess: type[Postprocess] | None
    """Set if the postprocessor has the fault; the backend's framework has its name."""
    noticed_by: tuple[str, ...]
    spreads_to: tuple[str, ...]
    case: str | None = None
    """Case of an engine, see `fd_core.testing.axes.steps`, that detects it; None if the tests above do without cases.
    """

    @property
    def shows_at_size(self) -> bool:
        """True if only the section `scale` has to detect it."""
        return all(test.startswith("scale:") for test in self.noticed_by)

    def is_named_by(self, test: str) -> bool:
        """Return True if a test may fail because of the fault."""
        return any(matches(test, pattern) for pattern in (*self.noticed_by, *self.spreads_to, *WHOLE_MODELS))


def matches(test: str, pattern: str) -> bool:
    """Return True if a test matches a pattern, which may end in *."""
    return test.startswith(pattern[:-1]) if pattern.endswith("*") else test == pattern


def wrong_in(base: str, case: str, **of_the_backend: Any) -> Any:
    """Turn a class with methods of a pack or a postprocessor into a backend that fails in a case of an engine."""

    def register(methods: type) -> type:
        wrong(base, "cases:test_step*", **of_the_backend)(methods)
        name, fault = FAULTS.popitem()
        FAULTS[name] = replace(fault, case=case)
        return methods

    return register


def wrong(base: str, *noticed_by: str, spreads_to: tuple[str, ...] = (), **of_the_backend: Any) -> Any:
    """Turn a class with methods of a pack or a postprocessor into a backend: they replace the right methods.

    `spreads_to` are scenarios in which the fault may show as well, in addition to the tests that name it; keyword
    arguments replace methods of the backend itself.
    """

    def register(methods: type) -> type:
        name = "wrong" + "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in methods.__name__)
        right, postprocess, framework = BASES[base], None, "numpy"
        if hasattr(methods, "token_matrix"):
            body = {"serves": (name,), "__module__": __name__}
            postprocess = type(methods.__name__ + "Postprocess", (methods, NumpyPostprocess), body)
            framework = name

        def make_ops(self: Any) -> Any:
            ops = right.make_ops(self)
            # Only faults in 8-bit KV run its tests, which repeat many of the others.
            described = {name: getattr(ops, name) for name in DESCRIBED_BY} | {"kv_dtypes": ()}
            body = {name: vars(methods).get(name, value) for name, value in described.items()}
            body["framework"] = framework
            ops.__class__ = type(methods.__name__, (methods, type(ops)), body)
            return ops

        body = {"name": name, "make_ops": make_ops, "__module__": __name__, "limits": MappingProxyType(right.limits)}
        backend = type(methods.__name__ + "Backend", (right,), body | of_the_backend)
        FAULTS[name] = Fault(name, backend, postprocess, noticed_by, spreads_to)
        return methods

    return register
