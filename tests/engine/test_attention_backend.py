"""Choice of the attention backend: rejected where a backend offers none, with hints for names of other servers."""

from __future__ import annotations

import pytest

from fd_core.config import EngineConfig
from fd_core.errors import ConfigError
from tests.engine.helpers import null_engine


@pytest.mark.parametrize("wanted", ["triton", "flashinfer", "torch"])
def test_backend_without_attention_choice_rejects_at_start(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"the null backend expects one of auto, got {wanted}") as found:
        null_engine(attention_backend=wanted)
    assert found.value.field == "--attention-backend"


def test_every_backend_takes_auto() -> None:
    null_engine(attention_backend="auto").close()


@pytest.mark.parametrize(("word", "here"), [("FLASHINFER", "flashinfer"), ("APPEND_ATTN", "auto")])
def test_foreign_attention_names_get_our_equivalent(word: str, here: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is not supported; use {here}"):
        EngineConfig(model="null", attention_backend=word)
