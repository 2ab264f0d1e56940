"""Progress messages of an engine during start."""

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine


def test_kernel_preparation_is_reported_at_start_and_end():
    calls = []
    engine = load_engine(EngineConfig(model="null", backend="null"), None, progress=lambda *each: calls.append(each))
    engine.close()
    assert calls[:2] == [("prepare", 0, 1), ("prepare", 1, 1)]
    assert {phase for phase, _, _ in calls[2:]} == {"load", "warmup"}
