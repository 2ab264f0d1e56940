"""An emulated backend is reported as emulated, regardless of its own description."""

from __future__ import annotations

from typing import ClassVar

import pytest

from fd_core.backends.null import NullBackend
from fd_core.config import EngineConfig, ServerConfig
from fd_core.engine.building import builder
from fd_core.engine.building.builder import load_engine
from fd_core.plugins import ChosenBackend


class Silent(NullBackend):
    line: ClassVar[str] = "a fast chip"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.emulated = True

    def describe(self) -> str:
        return self.line


class Open(Silent):
    line: ClassVar[str] = "a fast chip, emulated on the CPU"


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        (Silent, "emulated: a fast chip"),
        (Open, "a fast chip, emulated on the CPU"),
        (NullBackend, NullBackend(EngineConfig(model="m")).describe()),
    ],
)
def test_device_description_contains_emulated(monkeypatch: pytest.MonkeyPatch, backend, device) -> None:
    plugins = builder.installed_plugins()
    monkeypatch.setattr(type(plugins), "choose_backend", lambda *_: ChosenBackend("chip", backend, "selected by name"))
    config = EngineConfig(model="m", max_model_len=64, num_kv_blocks=8)
    engine = load_engine(config, None, progress=lambda *_: None)
    engine.close()
    assert engine.info.emulated == (backend is not NullBackend)
    assert engine.info.device == device

    from fd_core.cli.serving.summary import summary

    assert dict(summary(engine.info, ServerConfig(), "http://localhost"))["Device"] == device
