"""Fields that evaluation harnesses send: log-probabilities of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fd_core.http.errors import invalid
from fd_core.types import NumLogprobs

MAX_PROMPT_LOGPROBS: Final = 2**20
"""Log-probabilities of prompts that one answer may hold."""


class EvaluationFields(msgspec.Struct, kw_only=True):
    """Of completions and chat; null means the default."""

    prompt_logprobs: NumLogprobs | None = None
    """Most likely tokens told beside each token of the prompt; 0 tells the prompt's own only."""


def check_prompt_logprobs(top: int | None, tokens: int, field: str) -> None:
    """Refuse what one answer cannot hold: `top` likely tokens, and its own, for each of `tokens` of the prompts.

    `field` asked for them.
    """
    if top is not None and tokens * (1 + top) > MAX_PROMPT_LOGPROBS:
        raise invalid(
            f"{field}: the prompts have {tokens} tokens, choices included, and {1 + top} log-probabilities of each "
            f"would be {tokens * (1 + top)}; one answer holds {MAX_PROMPT_LOGPROBS}: ask for fewer, or "
            "send several requests",
            field,
        )


def check_logprobs(top: int | None, max_tokens: Sequence[int], n: int, context: int) -> None:
    """Refuse what one answer cannot hold: `top` likely tokens, and its own, for each token of `n` texts a prompt.

    `max_tokens` are the longest texts of each prompt. One text as long as the `context` is always served.
    """
    if top is None:
        return
    told = sum(max_tokens) * n * (1 + top)
    most = max(MAX_PROMPT_LOGPROBS, (1 + top) * context)
    if told > most:
        raise invalid(
            f"logprobs: {len(max_tokens) * n} texts of up to {max(max_tokens)} tokens, and {1 + top} log-probabilities "
            f"of each token, would be {told}; one answer holds {most}: ask for fewer, or set max_tokens",
            "logprobs",
        )
