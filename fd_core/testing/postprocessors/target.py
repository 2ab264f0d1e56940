"""The postprocessor under test, found as a user would find it, and the pack whose arrays it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fd_core.config import Limits
from fd_core.ops.contract import Ops
from fd_core.plugins import POSTPROCESS, installed_plugins
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.testing.kit.target import parse_target

_BACKENDS: Final[Mapping[str, str]] = {
    "numpy": "reference",
    "torch": "cpu:native_kernels=false",
    "paddle": "cpu+paddle",
}
"""A backend on the processor for each framework."""


@dataclass(frozen=True)
class PostprocessTarget:
    """One postprocessor under a name, with a pack that it serves."""

    name: str
    make: Callable[[Ops, Limits], Postprocess]
    ops: Ops
    device: str = ""
    """A line about what computes."""
    emulated: bool = False


def find_postprocessor(text: str) -> PostprocessTarget:
    """Return the postprocessor that `NAME` or `NAME:FIELD=VALUE,...` names, on the backend that `backend=` names.

    Otherwise it is a backend on the processor for the first framework that it serves. Raises `PluginError` if the
    postprocessor is missing, cannot be imported or is not for that backend, `ConfigError` for an unknown field.
    """
    name, _, rest = text.partition(":")
    served = installed_plugins().load(POSTPROCESS, name).serves
    settings = dict.fromkeys(filter(None, rest.split(",")))
    named = [each for each in settings if each.startswith("backend=")]
    backend = named[-1].removeprefix("backend=") if named else next((_BACKENDS.get(each, each) for each in served), "")
    rest = ",".join([f"postprocess={name}", *(each for each in settings if each not in named)])
    target = parse_target(f"{backend}{',' if ':' in backend else ':'}{rest}", Path())
    return PostprocessTarget(name, target.postprocess, target.ops, target.backend.describe(), target.emulated)
