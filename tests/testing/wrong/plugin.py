"""Offers the wrong backends as a plugin; the tests install it through a folder on the path."""

from __future__ import annotations

from fd_core.hookspecs import CONTRACT_VERSION, Entry, hookimpl
from tests.testing.wrong import computing, engines, scaling, signalling, storing
from tests.testing.wrong.fault import FAULTS

FD_CONTRACT = CONTRACT_VERSION
MODULES = (signalling, computing, storing, scaling, engines)

POSTPROCESSORS = {fault.name: fault.postprocess for fault in FAULTS.values() if fault.postprocess is not None}

globals().update({fault.backend.__name__: fault.backend for fault in FAULTS.values()})
globals().update({each.__name__: each for each in POSTPROCESSORS.values()})


@hookimpl
def fd_register_backends() -> list[Entry]:
    return [Entry(fault.name, f"{__name__}:{fault.backend.__name__}", "wrong on purpose") for fault in FAULTS.values()]


@hookimpl
def fd_register_postprocessors() -> list[Entry]:
    return [Entry(name, f"{__name__}:{each.__name__}", "wrong on purpose") for name, each in POSTPROCESSORS.items()]
