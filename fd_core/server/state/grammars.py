"""The grammars of requests: made and compiled in other processes, so that a bad one is a 400 and delays no one else."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from fd_core.engine.process.messages import EngineInfo
from fd_core.errors import BadRequest
from fd_core.http.errors import invalid, unavailable
from fd_core.server.preprocess.structured_fields import StructuredFields, form_asked
from fd_core.structured.compiler import vocabulary_table
from fd_core.structured.grammar import FormAsked
from fd_core.structured.workers.messages import FormOutcome
from fd_core.structured.workers.pool import CompilePool
from fd_core.text.tokenizer import Tokenizer

_WAIT_SECONDS: Final = 30.0
"""For a slot, a process and the work together."""
_WARM_UP_SECONDS: Final = 2.0
"""Pause after the start of a server, whose first requests need the processors themselves."""


class GrammarChecker:
    """Makes grammars of what requests ask for; one for each server."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        """`info` is that of the engine whose requests are checked."""
        self._served = info.structured_output
        self._pool = CompilePool(partial(vocabulary_table, tokenizer, info.vocab_size, info.eos_token_ids))

    def warm_up(self) -> None:
        """Start a process soon, so that the first request with a form need not wait for it."""
        if self._served:
            self._pool.warm_up(_WARM_UP_SECONDS)

    async def grammar(self, fields: StructuredFields) -> FormOutcome:
        """Return the grammar that a request asks for, see `checked`; an empty one for any text."""
        form = form_asked(fields)
        return FormOutcome() if form is None else await self.checked(form)

    async def checked(self, form: FormAsked) -> FormOutcome:
        """Return the grammar of a form, compiled once to see that it can be, and what it leaves open.

        Raises `ApiError` (400) that names the place of a form that cannot be used or takes too long, and 503 where too
        many others are before it.
        """
        if not self._served:
            raise invalid(f"{form.field}: structured output is switched off here", form.field, "unsupported_parameter")
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                outcome = await self._pool.run(form)
        except (OSError, EOFError):  # a timeout is an `OSError`
            raise unavailable(
                f"{form.field}: no process was free for its grammar; try again", "grammars_busy", retry_after=5
            ) from None
        if outcome.message:
            raise BadRequest(outcome.message, field=outcome.field, code=outcome.code)
        return outcome

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()
