"""Registration, health, and new incarnations of workers."""

from __future__ import annotations

import pytest

from fd_core.errors import BadRequest
from fd_core.router.config import RouterConfig
from fd_core.router.workers import Circuit, Registry, RouterWorker, WorkerState


def registry_of(**settings: int) -> Registry:
    return Registry(RouterConfig(**settings))  # type: ignore[arg-type]


def state_of(registry: Registry, worker: RouterWorker) -> WorkerState:
    member = registry.member(worker)
    return WorkerState.GONE if member is None else member.state


def healthy(registry: Registry, instance: str | None = None) -> RouterWorker:
    worker = registry.register("http://a", "mixed", 0.0)
    return registry.health(worker, True, 0.0, instance=instance)


def test_worker_is_unknown_until_its_checks_pass() -> None:
    registry = registry_of(health_success_threshold=2)
    worker = registry.register("http://a/", "mixed", 0.0)
    assert worker.url == "http://a" and state_of(registry, worker) is WorkerState.UNKNOWN
    assert registry.health(worker, True, 1.0) == worker and state_of(registry, worker) is WorkerState.UNKNOWN
    assert registry.health(worker, True, 2.0) == worker and state_of(registry, worker) is WorkerState.HEALTHY


def test_only_consecutive_failures_count() -> None:
    registry = registry_of(health_failure_threshold=2)
    worker = healthy(registry)
    for ok in (False, True, False):
        registry.health(worker, ok, 1.0)
    assert state_of(registry, worker) is WorkerState.HEALTHY
    registry.health(worker, False, 2.0)
    assert state_of(registry, worker) is WorkerState.UNHEALTHY


def test_recovered_worker_is_a_new_incarnation() -> None:
    registry = registry_of(health_success_threshold=2)
    worker = registry.register("http://a", "mixed", 0.0)
    registry.health(worker, False, 1.0)
    assert registry.health(worker, True, 2.0) == worker
    again = registry.health(worker, True, 3.0)
    assert again.url == worker.url and again.incarnation > worker.incarnation
    assert state_of(registry, again) is WorkerState.HEALTHY and registry.member(worker) is None


def test_same_process_is_the_same_incarnation() -> None:
    registry = registry_of()
    worker = healthy(registry, instance="one")
    registry.health(worker, False, 1.0)
    assert registry.health(worker, True, 2.0, instance="one") == worker
    assert state_of(registry, worker) is WorkerState.HEALTHY


@pytest.mark.law("7.4")
def test_new_process_is_a_new_incarnation_without_a_failed_check() -> None:
    registry = registry_of()
    worker = healthy(registry, instance="one")
    again = registry.health(worker, True, 1.0, instance="two")
    assert again != worker and state_of(registry, again) is WorkerState.HEALTHY


def test_late_check_of_an_earlier_incarnation_changes_nothing() -> None:
    registry = registry_of()
    worker = healthy(registry)
    again = registry.health(registry.register("http://a", "mixed", 1.0), True, 1.0)
    registry.health(worker, False, 2.0)
    assert state_of(registry, again) is WorkerState.HEALTHY


def test_reregistration_is_new_unless_it_names_the_same_process() -> None:
    registry = registry_of()
    worker = registry.register("http://a", "mixed", 0.0, instance="one")
    assert registry.register("http://a", "mixed", 1.0, instance="one") == worker
    assert registry.register("http://a", "decode", 1.0, instance="one") != worker
    before = registry.at("http://a")
    assert registry.register("http://a", "decode", 2.0) != before
    assert len(list(registry)) == 1


def test_deregistered_worker_drains_until_idle() -> None:
    registry = registry_of()
    worker = healthy(registry)
    assert not registry.idle(worker)
    assert registry.deregister("http://a/", 1.0) == worker
    assert state_of(registry, worker) is WorkerState.DRAINING
    registry.health(worker, True, 2.0)
    assert state_of(registry, worker) is WorkerState.DRAINING
    assert registry.idle(worker)
    assert registry.member(worker) is None and registry.deregister("http://a", 3.0) is None


def test_worker_that_registers_while_draining_is_new() -> None:
    registry = registry_of()
    worker = registry.register("http://a", "mixed", 0.0, instance="one")
    registry.deregister("http://a", 1.0)
    assert registry.register("http://a", "mixed", 2.0, instance="one") != worker
    assert not registry.idle(worker)


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:1", "ftp://a", "http://", "http://u:p@a", "http://a?x", "http://a b", "http://a#b", "http://a\r\nb"),
        *("http://[", "http://[::1", "http://[a]", "http://:80", "http://a:b", "http://a:0", "http://a:65536"),
    ],
)
def test_invalid_address_is_rejected(url: str) -> None:
    with pytest.raises(BadRequest, match="not a worker URL"):
        registry_of().register(url, "mixed", 0.0)


def test_unknown_role_is_rejected() -> None:
    with pytest.raises(BadRequest, match="unknown role 'both'"):
        registry_of().register("http://a", "both", 0.0)  # type: ignore[arg-type]


def test_trial_without_a_verdict_allows_another() -> None:
    circuit = Circuit(first=1.0, longest=30.0, max_failures=3, on_turn=lambda: None)
    circuit.failure(0.0, severe=True)
    assert circuit.admit(1.0) and not circuit.ready(1.0)
    circuit.withdraw()
    assert circuit.ready(1.0)
    circuit.admit(1.0)
    circuit.success()
    circuit.withdraw()
    assert circuit.state == "closed"
