"""A driver for Triton without a GPU: it counts what would be compiled, and launches nothing.

Triton makes a key of every launch: the types of its arguments, which of them are 1 or a multiple of 16, its constants
and its options. A launch whose key is new compiles, so new keys are counted as compilations. This is where Triton asks
its cache hook, which releases 3.2 and 3.3 keep in `JITFunction` and 3.4 to 3.9 in `triton.knobs`. The hook keeps
Triton from compiling, so every launch queries it again; with `compiles` it compiles each key once and records errors.

Kernels that never ran leave their results as they were allocated: `zeros_for_empty` makes that zeros, so tokens stay
within the vocabulary and steps go on.

Only for a separate process, without TRITON_INTERPRET.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from processor import Processor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class H100(Processor):
    """The CPU with the properties of an H100."""

    name = "processor that calls itself H100"  # type: ignore[assignment]  # a property of `Cuda`
    has_bfloat16 = has_float16 = True  # type: ignore[assignment]  # as above
    multiplies_fp8 = True  # type: ignore[assignment]  # as above
    multiprocessors = 132  # type: ignore[assignment]  # as above
    shared_memory_per_block = 227 * 1024  # type: ignore[assignment]  # as above


class FakeDriver:
    """The part of a driver that a launch queries before it looks up the compiled kernel."""

    def __init__(self, capability: int = 90, *, compiles: bool = False) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self._compiles = compiles
        self._keys: dict[tuple[str, Any], str] = {}
        self.launches = 0
        self.failures: list[str] = []
        self.fusing: dict[str, bool] = {}
        """By kernel whether products and sums may become one instruction, at its last launch."""

    @property
    def compiled(self) -> tuple[str, ...]:
        """The kernel, options, argument types and constants of each compilation so far, in order."""
        return tuple(self._keys.values())

    def install(self) -> FakeDriver:
        """Become Triton's driver for the rest of the process."""
        driver.set_active(self)
        if hasattr(triton, "knobs"):
            triton.knobs.runtime.jit_cache_hook = self._on_cache_lookup
        else:
            JITFunction.cache_hook = self._on_cache_lookup
        return self

    def is_active(self) -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def _on_cache_lookup(self, *, key: Any, repr: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Count a launch, and its key if it is new. True: do not compile, do not launch."""
        self.launches += 1
        self.fusing[fn.name] = compile["enable_fp_fusion"]
        place = f"{fn.module}.{fn.name}", str(key)
        if place not in self._keys:
            self._keys[place] = _described(fn.name, fn.jit_function.arg_names, compile)
            if self._compiles:
                self._compile(fn.jit_function, compile, self._keys[place])
        return True

    def _compile(self, kernel: Any, asked: dict[str, Any], name: str) -> None:
        source = ASTSource(kernel, asked["signature"], asked["constants"], asked["configs"][0])
        try:
            triton.compile(
                source,
                target=self._target,
                options=options_of(asked),
            )
        except Exception as error:  # noqa: BLE001 - the test reports any error
            self.failures.append(f"{name}: {type(error).__name__}: {error}")


def options_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler options of a launch."""
    return {option: asked[option] for option in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")}


def _described(kernel: str, names: list[str], asked: dict[str, Any]) -> str:
    """Return the key of a compilation: options, constants (including arguments of value 1), and divisibility by 16."""
    facts = [f"{option}={asked[option]}" for option in ("num_warps", "num_stages")]
    for place, value in asked["constants"].items():
        facts.append(f"{names[place[0]] if isinstance(place, tuple) else place}={value}")
    attributes = asked["configs"][0]
    if isinstance(attributes, dict):
        divided = [place[0] for place, found in attributes.items() if found]
    else:  # releases before 3.3
        divided = attributes.arg_properties.get("tt.divisibility", ())
    facts += [f"{names[place]}%16" for place in divided]
    return f"{kernel}({', '.join(facts)})"


def zeros_for_empty() -> None:
    """Make torch fill uninitialised allocations with zeros, in all threads and for the rest of the process."""
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(place, name, _filling(getattr(place, name)))


def _filling(allocate: Any) -> Any:
    return lambda *sizes, **options: allocate(*sizes, **options).zero_()
