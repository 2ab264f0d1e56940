"""Sizes of a step that the settings leave to the backend: its defaults, halved until they fit in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest

from fd_core.backends.null import NullBackend
from fd_core.config import EngineConfig
from fd_core.engine.computing import Computing
from fd_core.errors import ConfigError

MIB = 2**20
FULL = {"max_num_seqs": "256", "max_num_batched_tokens": "8,192"}


class Roomy(NullBackend):
    """Reserves a mebibyte for every 64 tokens of a step; the device has `total` bytes, of which `most` fit a step."""

    default_num_seqs: ClassVar[int] = 256
    default_batched_tokens: ClassVar[int] = 8192
    total: ClassVar[int] = 1024 * MIB
    most: ClassVar[int] = 1024 * MIB

    def rehearse(self, steps: AbstractContextManager[None]) -> None:
        if self.reserved_memory > self.most:
            raise MemoryError("no room")

    @property
    def reserved_memory(self) -> int:
        tokens = self.config.max_num_batched_tokens or self.default_sizes["default_batched_tokens"]
        return tokens // 64 * MIB

    def free_memory(self) -> int:
        return self.total - self.reserved_memory


@pytest.fixture
def computing(monkeypatch):
    """Return a function that loads an engine's parts on a device with some memory, in MiB."""

    def load(total: int, most: int | None = None, **settings: Any) -> Computing:
        monkeypatch.setattr("fd_core.backends.null.NullBackend", Roomy)
        monkeypatch.setattr(Roomy, "total", total * MIB)
        monkeypatch.setattr(Roomy, "most", (total if most is None else most) * MIB)
        loaded = Computing(EngineConfig(model="null", backend="null", **settings), None, lambda *_: None)
        loaded.loaded()
        return loaded

    return load


def sizes(loaded: Computing) -> tuple[int, int]:
    return loaded.requested["max_num_seqs"], loaded.requested["max_num_batched_tokens"]


@pytest.mark.parametrize(
    ("total", "most", "expected", "halvings"),
    [
        (512, None, (256, 8192), 0),  # 128 MiB are a quarter
        (511, None, (128, 4096), 1),
        (255, None, (64, 2048), 2),
        (1024, 64, (128, 4096), 1),  # more cannot be allocated
        (33, 32, (32, 2048), 3),  # the smallest defaults, which fit, but leave little
    ],
)
def test_defaults_are_halved_until_they_fit(computing, total, most, expected, halvings):
    loaded = computing(total, most)
    assert sizes(loaded) == expected
    assert loaded.backend.halvings == halvings
    lowered = {name: f" is {full}, lowered to leave memory for KV" * (halvings > 0) for name, full in FULL.items()}
    assert loaded.size_reasons == {name: f"default of null{text}" for name, text in lowered.items()}
    assert loaded.loaded().halvings == halvings


def test_sizes_in_the_settings_are_kept(computing):
    loaded = computing(200, max_num_seqs=300, max_num_batched_tokens=8192)
    assert sizes(loaded) == (300, 8192)
    assert loaded.size_reasons == {}


def test_only_the_missing_size_is_halved(computing):
    loaded = computing(255, max_num_seqs=300)
    assert sizes(loaded) == (300, 2048)
    assert set(loaded.size_reasons) == {"max_num_batched_tokens"}


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 256, "max_num_batched_tokens": 2048}])
def test_step_that_never_fits_is_an_error_with_a_hint(computing, settings):
    with pytest.raises(ConfigError, match="does not fit in memory with the weights: no room") as caught:
        computing(1024, 16, **settings)
    assert caught.value.field == "--max-num-batched-tokens"
