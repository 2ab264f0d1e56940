"""Checks the grammars of requests on threads of their own, so that a bad one is a 400 and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from fd_core.engine.messages import EngineInfo
from fd_core.errors import BadRequest
from fd_core.sampling_checks import check_structure
from fd_core.server.errors import ApiError, invalid
from fd_core.server.structured_fields import FormAsked, StructuredFields, form_asked
from fd_core.structured import grammar
from fd_core.structured.background import LARGE_GRAMMAR, yield_to_all_others, yield_to_others
from fd_core.structured.compiler import GrammarCompiler, GrammarError
from fd_core.structured.faults import faulty_place
from fd_core.structured.vocabulary import grammar_vocabulary
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import SamplingParams

__all__ = ["GrammarChecker"]

log = logging.getLogger(__name__)

_THREADS: Final = 2
_SECONDS: Final = 30.0
"""For one grammar to be made and compiled, with the wait for a thread."""
_CODE: Final = "invalid_grammar"


class GrammarChecker:
    """Makes grammars of what requests ask for; one for each server."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo, *, seconds: float = _SECONDS) -> None:
        """`info` is that of the engine whose requests are checked."""
        self._served = info.structured_output
        self._compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, info.vocab_size, info.eos_token_ids))
        self._threads = ThreadPoolExecutor(_THREADS, "fdcore-grammars", yield_to_others)
        self._large = ThreadPoolExecutor(1, "fdcore-large-grammars", yield_to_all_others)
        self._seconds = seconds

    def warm_up(self) -> None:
        """Have a thread make the vocabulary, so that the first request need not wait for it."""
        if self._served:
            self._threads.submit(self._make_vocabulary)

    async def grammar(self, fields: StructuredFields) -> str | None:
        """Return the grammar that a request asks for, compiled once to see that it can be; None for any text.

        Raises `ApiError` (400) that names the place of a form that cannot be used or takes too long.
        """
        form = form_asked(fields)
        return None if form is None else await self.checked(form)

    async def require(self, params: SamplingParams, field: str) -> None:
        """Raise an error (400) if the grammar of `params`, from `field`, cannot be compiled or is contradicted."""
        check_structure(params)
        if params.grammar is not None:
            await self.checked(FormAsked(field, partial(str, params.grammar)))

    async def checked(self, form: FormAsked) -> str:
        """Return the grammar of a form, compiled once to see that it can be; see `grammar`."""
        if not self._served:
            raise invalid(f"{form.field}: structured output is switched off here", form.field, "unsupported_parameter")
        try:
            return await asyncio.wait_for(self._compiled(form), self._seconds)
        except TimeoutError:
            raise invalid(
                f"{form.field}: it could not be compiled within {self._seconds:g} s; make it smaller", form.field, _CODE
            ) from None

    def close(self) -> None:
        """End the threads; what they do is not waited for."""
        for threads in (self._threads, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _compiled(self, form: FormAsked) -> str:
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._threads, form.make)
        threads = self._large if len(made) > LARGE_GRAMMAR else self._threads
        await loop.run_in_executor(threads, self._require, form, made)
        return made

    # On a thread ------------------------------------------------------------------------------------------

    def _make_vocabulary(self) -> None:
        try:
            self._compiler.warm_up()
        except GrammarError as error:
            log.warning("structured output cannot be served: %s", error)

    def _require(self, form: FormAsked, made: str) -> None:
        try:
            self._compiler.matcher(made)
        except GrammarError as error:
            raise self._explain(form, str(error)) from None

    def _explain(self, form: FormAsked, reason: str) -> ApiError:
        place, schema = form.field, form.schema
        for each, part in form.parts:
            with contextlib.suppress(BadRequest, GrammarError):
                if refused := self._refusal(part):
                    place, schema, reason = each, dict(part), refused
                    break
        if schema is not None:
            with contextlib.suppress(BadRequest, GrammarError):
                if form.spaces and self._refusal(schema) is None:
                    place = form.spaces
                else:
                    place += faulty_place(schema, reason, self._refusal)
        return invalid(f"{place}: {reason}", place, _CODE)

    def _refusal(self, schema: Any) -> str | None:
        return self._compiler.refusal(grammar.json_schema(schema))
