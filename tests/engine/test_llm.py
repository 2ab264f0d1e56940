"""State left by a failed call of a model used without a server."""

from __future__ import annotations

import pytest

from fd_core.engine.llm import LLM
from fd_core.errors import FdError
from fd_core.types import SamplingParams


def test_invalid_prompt_leaves_no_request_running() -> None:
    llm = LLM("null", backend="null")
    try:
        with pytest.raises(FdError, match="lone surrogate"):
            llm.generate(["one", "\ud800"], SamplingParams(max_tokens=1000))
        assert not llm._engine.has_work
        assert len(llm.generate("two", SamplingParams(max_tokens=2))[0].token_ids) == 2
    finally:
        llm.close()
