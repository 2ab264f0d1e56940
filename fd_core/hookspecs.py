"""Every hook a plugin may implement; each docstring is the hook's contract.

A plugin is a module named in an entry point of group `fd_core`. It declares `FD_CONTRACT = 1` and implements hooks
marked with `hookimpl`. Hooks are called once, when the process discovers its plugins, and the results of all plugins
are joined; they return descriptions, and the classes that the descriptions name are imported only when used. Discovery
must not import a framework, touch a device or start a thread.
"""

# A specification has no body: pluggy never calls one.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pluggy

__all__ = ["CONTRACT_VERSION", "ENTRY_POINT_GROUP", "Entry", "hookimpl", "hookspec"]

ENTRY_POINT_GROUP: Final = "fd_core"
CONTRACT_VERSION: Final = 1
"""Grows when a hook or a class that plugins implement changes in an incompatible way."""

hookspec = pluggy.HookspecMarker("fd_core")
hookimpl = pluggy.HookimplMarker("fd_core")


@dataclass(frozen=True, slots=True)
class Entry:
    """Named implementation that a plugin offers."""

    name: str
    """Lower case, digits, `_` and `+`; unique among entries of its kind."""
    target: str
    """`package.module:Class`, imported when the entry is used."""
    summary: str
    """One line for lists."""


@hookspec
def fd_register_backends() -> Sequence[Entry]:
    """Offer hardware backends.

    Each target is a subclass of `fd_core.backends.contract.Backend`. A name that another plugin offers as well is an
    error.
    """


@hookspec
def fd_register_models() -> Sequence[Entry]:
    """Offer families of models.

    Each target is a subclass of `fd_core.models.families.contract.Family`, made without arguments. It describes the
    decoders of its architectures by their configs and names their tensors, and computes nothing itself. An architecture
    that another family has is an error. `fdcore conformance --model-family NAME` compares it with `transformers`.
    """


@hookspec
def fd_register_drafters() -> Sequence[Entry]:
    """Offer drafters for speculative decoding.

    Each target is a subclass of `fd_core.runner.drafting.Drafter`, or of `PerSlotDrafter` there if it handles one
    request at a time; it is made from a `DraftContext`, which can load a separate model. Its name is the `method` of
    `--speculative-config`. A drafter may propose anything: a draft token is accepted only if it is the token that would
    have been sampled anyway.
    """


@hookspec
def fd_register_postprocessors() -> Sequence[Entry]:
    """Offer postprocessors, which write the token matrix of a step on the device.

    Each target is a subclass of `fd_core.runner.postprocess.contract.Postprocess`, which lists the frameworks or
    backends it supports. Under the name of a framework it is the default for that framework, and under that of a
    backend for that backend. It satisfies section 1 of the invariants; `fdcore conformance --postprocess NAME` verifies
    it.
    """


@hookspec
def fd_register_observers() -> Sequence[Entry]:
    """Offer observers, which receive the tokens that each step sampled.

    Each target is a subclass of `fd_core.runner.observing.Observer`. It sees frozen values without prompts, on a
    separate thread with a bounded queue: it changes no text, and metrics count its failures and the steps that it
    missed.
    """


@hookspec
def fd_register_schedulers() -> Sequence[Entry]:
    """Offer whole schedulers.

    Called once at discovery; the results of all plugins are joined. Each target is a subclass of
    `fd_core.scheduling.contract.Scheduler`, made from a `SchedulerSetup` there for each epoch of the engine, without
    I/O, clock or randomness. It satisfies sections 1 to 3 of the invariants; `fdcore conformance --scheduler NAME`
    verifies it. To change only the order of waiting requests or the choice of victims, offer a policy.
    """


@hookspec
def fd_register_scheduling_policies() -> Sequence[Entry]:
    """Offer scheduling policies.

    Each target is a subclass of `fd_core.scheduling.policies.SchedulingPolicy`: it orders waiting requests, without
    I/O, clock or randomness.
    """


@hookspec
def fd_register_victim_policies() -> Sequence[Entry]:
    """Offer victim policies: which running request is preempted when KV blocks run out.

    Each target is a subclass of `fd_core.scheduling.victims.VictimPolicy`, without I/O, clock or randomness.
    """


@hookspec
def fd_register_stores() -> Sequence[Entry]:
    """Offer KV stores, which keep the KV of preempted and finished requests outside the engine.

    Each target is a subclass of `fd_core.kv.stores.contract.KVStore`; its name is the scheme before the colon of
    `--kv-store`. A store moves opaque bytes and is best effort: the core checks all that it returns, and recomputes
    missing or damaged KV.
    """


@hookspec
def fd_register_connectors() -> Sequence[Entry]:
    """Offer connectors: how KV travels from a prefill worker to a decode worker.

    Each target is a subclass of `fd_core.disagg.connectors.contract.Connector`; its name is the value of
    `--kv-connector` of the decode worker, and the prefill worker needs the plugin as well. A connector moves opaque,
    sealed bytes and may fail at any time: the core checks what arrives, and the decode worker computes the prompt
    itself if anything is wrong.
    """


@hookspec
def fd_register_router_policies() -> Sequence[Entry]:
    """Offer router policies: which worker gets a request.

    Each target is a subclass of `fd_core.router.policies.RouterPolicy`, without I/O, clock or randomness;
    its name is a `policy`, `prefill-policy` or `decode-policy` of the router. It is made from the `RouterConfig`, once
    for each role, and sees frozen values: the workers that may be chosen with their loads, the prompt, one random
    number and the time.
    """


@hookspec
def fd_register_launchers() -> Sequence[Entry]:
    """Offer launchers, which start the processes of a deployment on nodes, place them and supervise them.

    Each target is a subclass of `fd_core.launching.contract.Launcher`, made without arguments. It carries no tokens:
    processes connect to each other. `fd_core.testing.launchers.LauncherSuite` verifies it.
    """


@hookspec
def fd_register_scaling_policies() -> Sequence[Entry]:
    """Offer scaling policies: how many workers a group of a deployment should have.

    Each target is a subclass of `fd_core.cluster.scaling.ScalingPolicy`, without I/O, clock or randomness;
    its name is a `policy` in the file of `fdcore cluster serve`. The proposed number is limited to the bounds there.
    """


@hookspec
def fd_register_tool_parsers() -> Sequence[Entry]:
    """Offer tool parsers, which find tool calls in the text of an answer.

    Each target is a subclass of `fd_core.text.parsing.contract.ToolParser`; its name is a `--tool-call-parser`. One is
    made for each answer to a request that offers tools, on the server's event loop: no I/O, no clock, no exceptions for
    a text. It satisfies the invariants at the top of that module: wherever the text is split, the joined events of a
    stream are those of the whole text. `fdcore conformance --tool-parser NAME` verifies it.
    """


@hookspec
def fd_register_reasoning_parsers() -> Sequence[Entry]:
    """Offer reasoning parsers, which separate reasoning from content in the text of an answer.

    Each target is a subclass of `fd_core.text.parsing.contract.ReasoningParser`; its name is a `--reasoning-parser`.
    One is made for each answer of a conversation, with the end of the prompt; it satisfies the invariants at the top of
    that module, and `fdcore conformance --reasoning-parser NAME` verifies it.
    """
