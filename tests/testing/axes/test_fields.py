"""Every field of a contract is varied by an axis of a kit, or excused with a reason."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import fd_core.testing as package
from fd_core import plugins, types
from fd_core.cluster.scaling import GroupLoad
from fd_core.config import EngineConfig, Limits
from fd_core.config.constraints import Range
from fd_core.disagg.connectors.contract import Connector, ConnectorSettings, KVInbox, KVOutbox
from fd_core.kv.stores.contract import KVStore
from fd_core.ops import contract
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, RoutingContext
from fd_core.router.selection import WorkerLoad
from fd_core.router.workers import RouterWorker
from fd_core.runner.drafting import DraftContext, Drafter
from fd_core.runner.observing import SampledRequest, SampledStep
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.victims import RunningRequests
from fd_core.testing.axes.covering import case_text, default_case, parse_case
from fd_core.testing.axes.parts import cases_of
from fd_core.text.parsing.contract import (
    CallForm,
    FreePart,
    OutputParser,
    ReasoningParser,
    TaggedArguments,
    ToolParser,
)

TYPES = (
    contract.Experts,
    contract.Heads,
    contract.HostStep,
    contract.KVShape,
    contract.Latent,
    contract.Lora,
    contract.Norm,
    contract.PenaltyInput,
    contract.Recurrent,
    contract.Rope,
    contract.SampleInput,
    contract.StepInput,
    KVStore,
    Connector,
    KVInbox,
    KVOutbox,
    ConnectorSettings,
    RoutingContext,
    Candidate,
    WorkerLoad,
    RouterWorker,
    RouterConfig,
    GroupLoad,
    SampledStep,
    SampledRequest,
    types.RequestSpec,
    types.SamplingParams,
    types.Reasoning,
    types.Pooling,
    types.PrefillJob,
    types.Admission,
    types.StepPlan,
    Limits,
    EngineConfig,
    SchedulerSetup,
    QueuedRequest,
    RunningRequests,
    Postprocess,
    Drafter,
    DraftContext,
    OutputParser,
    ToolParser,
    ReasoningParser,
    CallForm,
    TaggedArguments,
    FreePart,
)
"""Values that plugins receive, and contracts whose methods receive them."""
WHOLE = ("Backend", "Family", "Launcher")
"""Contracts whose kits vary engines, models and processes, and no arguments."""
CONTRACTS = [
    getattr(importlib.import_module(f"fd_core.{module}"), name)
    for kind in vars(plugins).values()
    if isinstance(kind, plugins.Kind)
    for module, _, name in [kind.contract.partition(":")]
    if name not in WHOLE
]
"""Contracts of all kinds of plugins."""


def _makes_parts(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and "axes.parts import" in Path(spec.origin).read_text()


MODULES = [
    importlib.import_module(each.name)
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if ".suite" not in each.name and "axes.parts" not in each.name and _makes_parts(each.name)
]
VARIED_BY = {
    module.__name__: {
        field
        for part in vars(module).values()
        if type(part).__name__ == "Part"
        for axis in part.axes
        for field in axis.fields
    }
    for module in MODULES
}
PARTS = {part.name: part for module in MODULES for part in vars(module).values() if type(part).__name__ == "Part"}
VARIED = set().union(*VARIED_BY.values())
EXCUSED = {name: reason for module in MODULES for name, reason in getattr(module, "EXCUSED", {}).items()}


def _metadata_of_parts(annotated: object) -> list[object]:
    return [each for part in get_args(annotated) for each in getattr(part, "__metadata__", ())]


def fields_of(cls: type) -> list[str]:
    """Return the fields of a type; for a contract of methods, their arguments as `Class.method.argument`."""
    if inspect.isabstract(cls):
        methods = {name: method for name, method in vars(cls).items() if inspect.isfunction(method)}
        return [
            f"{cls.__name__}.{each if name == '__init__' else f'{name}.{each}'}"
            for name, method in methods.items()
            for each in inspect.signature(method).parameters
            if each != "self"
        ]
    names = (
        getattr(cls, "__struct_fields__", None)
        or getattr(cls, "_fields", None)
        or [field.name for field in dataclasses.fields(cls)]
    )
    return [f"{cls.__name__}.{name}" for name in names]


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_case_of_each_value_can_be_repeated_from_its_text(part):
    plain = default_case(part.axes)
    for axis in part.axes:
        for case in (*({axis.name: value} for value in axis.values), *axis.rare):
            assert parse_case(case_text({**plain, **case}, part.axes), part.axes) == {**plain, **case}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_every_value_of_an_axis_is_in_a_case(part):
    """A value that `allowed` excludes from all cases looks tested and is not."""
    cases = cases_of(part)[0]
    reached = {(name, case.values[name]) for case in cases for name in case.values}
    assert [
        (axis.name, value) for axis in part.axes for value in axis.values if (axis.name, value) not in reached
    ] == []


def fields_in_types(cls: type) -> set[str]:
    """Return the arguments of a contract's methods that have a type whose own fields are checked."""
    names = {each.__name__ for each in TYPES}
    return {
        f"{cls.__name__}.{each if name == '__init__' else f'{name}.{each}'}"
        for name, method in vars(cls).items()
        if inspect.isfunction(method)
        for each, annotation in inspect.get_annotations(method).items()
        if names.intersection(re.findall(r"\w+", str(annotation)))
    }


@pytest.mark.parametrize("cls", CONTRACTS, ids=lambda cls: cls.__name__)
def test_every_argument_of_a_contract_is_varied_or_excused(cls):
    left = {*fields_of(cls)} - VARIED - EXCUSED.keys() - fields_in_types(cls)
    assert left == set(), "no axis of a kit names these arguments of a contract"


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_every_field_is_varied_or_excused(cls):
    assert [name for name in fields_of(cls) if name not in VARIED and name not in EXCUSED] == []


def test_axes_and_excuses_name_fields_that_exist():
    known = {name for cls in (*TYPES, *CONTRACTS) for name in fields_of(cls)}
    assert (VARIED | EXCUSED.keys()) - known == set()
    assert all(EXCUSED.values())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_module_excuses_no_field_that_it_varies(module):
    """Another module may vary it: each states what reaches its own plugins."""
    assert VARIED_BY[module.__name__] & getattr(module, "EXCUSED", {}).keys() == set()


RANGES = {
    name: number
    for name, annotated in get_type_hints(EngineConfig, include_extras=True).items()
    for number in [*getattr(annotated, "__metadata__", ()), *_metadata_of_parts(annotated)]
    if isinstance(number, Range) and number.maximum < Range(0).maximum
}
"""Settings that have a largest value."""
_SLOTS = "a step of 65,536 rows takes minutes"
_ADAPTERS = "the part `lora` has them"
_CROWDED = "the part `size` has them; here slots and blocks are scarce"
WITHOUT_ENDS = {
    ("latent", "max_num_seqs"): _SLOTS,
    ("recurrent", "max_num_seqs"): _SLOTS,
    ("layer", "max_num_seqs"): _SLOTS,
    ("step", "max_num_seqs"): _SLOTS,
    ("size", "max_num_seqs"): _SLOTS,
    ("layer", "max_loras"): _ADAPTERS,
    ("step", "max_loras"): _ADAPTERS,
    ("step", "num_threads"): "a process may not start as many",
    ("schedule", "max_num_seqs"): _CROWDED,
    ("schedule", "block_size"): _CROWDED,
}
"""Axes without an end of the range of a setting, with the reason."""


@pytest.mark.parametrize("part", [part for part in PARTS.values() if part.axes], ids=lambda part: part.name)
def test_axis_of_a_setting_has_both_ends_of_its_range(part):
    axes = {axis.name: axis for axis in part.axes}
    settings = {(edge.axis, name) for name, edge in part.edges.items()}
    settings |= {(name, field.removeprefix("EngineConfig.")) for name, axis in axes.items() for field in axis.fields}
    missing = {}
    for axis, name in settings:
        values = {*axes[axis].values, *(case[axis] for case in axes[axis].rare if axis in case)}
        if name in RANGES and (ends := {RANGES[name].minimum, RANGES[name].maximum} - values):
            missing[part.name, name] = ends
    assert missing.keys() == {name for name in WITHOUT_ENDS if name[0] == part.name}, missing
