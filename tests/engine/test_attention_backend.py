"""Who computes attention: refused where a backend has no such choice, and by the names of other servers."""

from __future__ import annotations

import pytest

from fd_core.config import EngineConfig
from fd_core.errors import ConfigError
from tests.engine.helpers import null_engine


@pytest.mark.parametrize("wanted", ["triton", "flashinfer", "torch"])
def test_a_backend_without_a_choice_refuses_at_start(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"the null backend expects one of auto, got {wanted}") as found:
        null_engine(attention_backend=wanted)
    assert found.value.field == "--attention-backend"


def test_every_backend_takes_auto() -> None:
    null_engine(attention_backend="auto").close()


@pytest.mark.parametrize(("word", "here"), [("FLASHINFER", "flashinfer"), ("APPEND_ATTN", "auto")])
def test_names_of_other_servers_are_refused_with_ours(word: str, here: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is not served here; use {here}"):
        EngineConfig(model="null", attention_backend=word)
