"""Fixtures of the suite: the backend under test and its optional features."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from fd_core.config.envelope import OperatingEnvelope
from fd_core.ops.contract import Ops
from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.limits import ABILITIES
from fd_core.testing.kit.plugin import chosen, run_for_each
from fd_core.testing.kit.requirements import declare_envelope, lacks, require_sizes
from fd_core.testing.kit.target import Target, parse_target
from fd_core.testing.models.arrays import Values

# The same examples for every backend, without shrinking, which is slow on some devices.
settings.register_profile(
    "fd_core_kit",
    phases=[Phase.explicit, Phase.generate],
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

SCALE = Path(__file__).parent / "scale"
_TARGETS: dict[str, Target] = {}


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("fd_core_kit")
    config.addinivalue_line("markers", "fd_scale: tests production sizes; excluded by `fdcore conformance --quick`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the section `scale` and run it last."""
    for item in items:
        if SCALE in item.path.parents:
            item.add_marker("fd_scale")
    items.sort(key=lambda item: item.get_closest_marker("fd_scale") is not None)


def pytest_collection_finish() -> None:
    """Exclude the objects of the collection from garbage collections: each engine that starts collects garbage."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_for_each(metafunc, "--fd-backend", "backend")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, checkpoints: Path) -> Target:
    if request.param not in _TARGETS:
        found = chosen(request.param, lambda name: parse_target(name, checkpoints))
        chosen(request.param, lambda _: found.ops)  # which imports it
        _TARGETS[request.param] = found
    declare_envelope(_TARGETS[request.param].backend.envelope)
    return _TARGETS[request.param]


@pytest.fixture(scope="session")
def golden(target: Target) -> Golden:
    return Golden(target)


@pytest.fixture
def ops(target: Target) -> Ops:
    return target.ops


@pytest.fixture
def values() -> Values:
    return Values(11)


@pytest.fixture
def envelope(target: Target) -> OperatingEnvelope:
    return target.cls.envelope


@pytest.fixture
def require(target: Target) -> Callable[..., None]:
    """Return a function that skips the test, with the backend's reason, if the backend lacks an ability."""

    def require(*abilities: str) -> None:
        for ability in abilities:
            assert ability in ABILITIES
            if ability in target.limits:
                lacks(target.limits[ability])

    return require


@pytest.fixture(autouse=True)
def whole_layers_are_needed(request: pytest.FixtureRequest) -> None:
    """Skip a file with `REQUIRES = (...)` or `SIZES = {...}` if the backend lacks an ability, or has smaller limits."""
    sizes: Mapping[str, int] = getattr(request.module, "SIZES", {})
    if sizes:
        request.getfixturevalue("target")
        require_sizes(sizes)
    needs: tuple[str, ...] = getattr(request.module, "REQUIRES", ())
    if needs:
        request.getfixturevalue("require")(*needs)
