"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.errors import BadRequest
from fd_core.http.errors import ApiError
from fd_core.server.api.openapi import DirectRoute, endpoint
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.jobs import Job, build_job, named_as_sent, other_names
from fd_core.server.preprocess.prompts import completion_prompts
from fd_core.server.preprocess.structured_fields import form_asked
from fd_core.server.schemas.requests import CompletionRequest
from fd_core.server.schemas.responses import CompletionAnswer, CompletionChoice, CompletionLogprobs, Usage
from fd_core.server.schemas.unsupported import COMPLETIONS
from fd_core.server.stream.generation import ChoiceStream, TextChunk
from fd_core.server.stream.response_format import (
    CollectedText,
    CompletionLogprobsBuilder,
    EncodedLists,
    ResponseFormat,
    slices,
)
from fd_core.server.stream.streaming import GenerationResponse, unless_gone
from fd_core.structured.workers.messages import FormOutcome
from fd_core.text.prompt_reader import PromptText
from fd_core.text.tokenizer import Tokenizer

router = APIRouter(route_class=DirectRoute)
BODY: Final = BodyFormat(CompletionRequest, COMPLETIONS)


@router.post("/v1/completions", **endpoint("Continue texts", CompletionRequest, CompletionAnswer, stream=True))
async def create_completion(request: Request) -> Response:
    """Generate texts that continue one or several prompts."""
    state, body, headers = await BODY.read(request)
    served = state.served(body.model)
    state.admit(1)
    try:
        form = form_asked(body)
        outcome = FormOutcome() if form is None else await unless_gone(request, state.grammars.checked(form))
        prompts = await unless_gone(request, completion_prompts(state, body))
        ids = [each.ids for each in prompts]
        job = build_job(state, request, body, served, ids, logprobs=body.logprobs, outcome=outcome)
    except (ApiError, BadRequest) as error:
        raise named_as_sent(error, other_names(body)) from None
    return GenerationResponse(state, _CompletionFormat(job, state.tokenizer, body, prompts), bool(body.stream), headers)


class _CompletionFormat(ResponseFormat):
    """Spells text completions; with `echo` the prompts' texts go first."""

    answer = CompletionAnswer
    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    opening = b',"text":'
    closing = b""

    def __init__(self, job: Job, tokenizer: Tokenizer, body: CompletionRequest, prompts: list[PromptText]) -> None:
        super().__init__(job, tokenizer)
        self._echoes: list[str] | None = None
        if body.echo:
            self._echoes = [
                tokenizer.decode(each.ids, job.skip_special) if each.text is None else each.text for each in prompts
            ]
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._echoed: dict[int, EncodedLists] = {}

    def first(self, choice: ChoiceStream, usage: Usage | None) -> bytes:
        if self._echoes is None and not self.job.token_ids:
            return b""
        echoed = self._echoed.get(choice.prompt_index)
        scores = b"null" if echoed is None else bytes(echoed.encoded())
        return self.lead(choice, usage, b',"text":' + msgspec.json.encode(self._echo(choice)), scores)

    def logprobs(self, choice: ChoiceStream, chunk: TextChunk) -> CompletionLogprobs:
        """Return log-probabilities; offsets go on from the chunk before."""
        builder = self._builders.get(choice.index)
        if builder is None:
            builder = self._builders[choice.index] = self._builder(len(self._echo(choice)))
        return builder.build(chunk.token_ids, chunk.logprobs)

    def choice(self, collected: CollectedText) -> CompletionChoice:
        choice, ending = collected.choice, self.ending(collected)
        scores = self.prompt_scores.get(choice.prompt_index, msgspec.UNSET)
        return CompletionChoice(text=self._echo(choice) + collected.text, prompt_logprobs=scores, **ending)

    async def prepare(self, choice: ChoiceStream) -> None:
        await super().prepare(choice)
        job, prompt = self.job, choice.prompt_index
        rows = None if choice.scores is None else choice.scores.rows
        if self._echoes is None or job.logprobs is None or rows is None or prompt in self._echoed:
            return
        builder = self._builder(0)
        told, ids, lists = [None, *rows], job.prompts[prompt], EncodedLists()
        for part in slices(len(ids)):
            lists.add(builder.build(ids[part], told[part]))
            await asyncio.sleep(0)
        self._echoed[prompt] = lists

    def begun_scores(self, choice: ChoiceStream) -> EncodedLists:
        return EncodedLists(self._echoed.get(choice.prompt_index))

    def _builder(self, offset: int) -> CompletionLogprobsBuilder:
        job = self.job
        return CompletionLogprobsBuilder(self.tokenizer, job.logprobs or 0, offset, job.skip_special, job.tokens_as_ids)

    def _echo(self, choice: ChoiceStream) -> str:
        return "" if self._echoes is None else self._echoes[choice.prompt_index]
