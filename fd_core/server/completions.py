"""POST /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.server.body import BodyFormat
from fd_core.server.errors import invalid
from fd_core.server.generation import ChoiceStream, TextChunk
from fd_core.server.jobs import build_job, check_stream
from fd_core.server.logprobs import CompletionLogprobsBuilder
from fd_core.server.openapi import endpoint
from fd_core.server.prompts import completion_prompts
from fd_core.server.request_schemas import CompletionRequest
from fd_core.server.response_format import CollectedText, ResponseFormat, ResponseOptions
from fd_core.server.response_schemas import CompletionAnswer, CompletionChoice, CompletionLogprobs, Usage
from fd_core.server.sampling import choices_per_prompt
from fd_core.server.state import state_of
from fd_core.server.streaming import GenerationResponse
from fd_core.server.tickets import prefill_peer
from fd_core.server.unsupported import COMPLETIONS

__all__ = ["CompletionFormat", "router"]

router = APIRouter()
_BODY: Final = BodyFormat(CompletionRequest, COMPLETIONS)


@router.post("/v1/completions", **endpoint("Continue texts", CompletionRequest, CompletionAnswer, stream=True))
async def create_completion(request: Request) -> Response:
    """Generate texts that continue one or several prompts."""
    state = state_of(request)
    body, headers = await _BODY.read(request, state.config.max_body_bytes)
    model = state.model_name(body.model)
    state.admit(1)
    prefill_at = prefill_peer(state, request)
    _check(body)
    usage_in_stream = check_stream(body)
    prompts = await completion_prompts(state, body.prompt, body.add_special_tokens is not False)
    n = choices_per_prompt(body, len(prompts))
    ids = [each.ids for each in prompts]
    job = build_job(state, body, request, ids, n, body.logprobs, prefill_at)
    echoes = None
    if body.echo:
        skip = job.rules.skip_special
        echoes = [state.tokenizer.decode(each.ids, skip) if each.text is None else each.text for each in prompts]
    options = ResponseOptions(
        response_id=f"cmpl-{job.request_id}",
        model=model,
        usage_in_stream=usage_in_stream,
        logprobs=body.logprobs,
        token_ids=bool(body.return_token_ids),
        skip_special=job.rules.skip_special,
    )
    answers = CompletionFormat(options, state.tokenizer, job.prompts, echoes)
    return GenerationResponse(state, job, answers, bool(body.stream), headers)


def _check(body: CompletionRequest) -> None:
    """Refuse combinations that are not served."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(
            f"best_of is {body.best_of} and n is {body.n or 1}; only equal values are supported",
            "best_of",
            "unsupported_parameter",
        )
    if body.echo and body.logprobs is not None:
        raise invalid(
            "logprobs together with echo is not supported: log-probabilities of the prompt are not served",
            "logprobs",
            "unsupported_parameter",
        )


class CompletionFormat(ResponseFormat):
    """Spells text completions; `echoes` are the prompts' texts if they go first."""

    chunk_object: ClassVar[str] = "text_completion"
    opening: ClassVar[bytes] = b',"text":'
    closing: ClassVar[bytes] = b""

    def __init__(
        self, options: ResponseOptions, tokenizer: Any, prompts: list[tuple[int, ...]], echoes: list[str] | None
    ) -> None:
        super().__init__(options, tokenizer, prompts)
        self._echoes = echoes
        self._builders: dict[int, CompletionLogprobsBuilder] = {}

    def first(self, choice: ChoiceStream) -> bytes:
        """Return the echo of the prompt, if asked for."""
        if self._echoes is None and not self.options.token_ids:
            return b""
        return self.lead(choice, b',"text":' + msgspec.json.encode(self._echo(choice)))

    def logprobs(self, choice: ChoiceStream, chunk: TextChunk | CollectedText) -> CompletionLogprobs:
        """Return log-probabilities; offsets go on from the chunk before."""
        builder = self._builders.get(choice.index)
        if builder is None:
            builder = self._builders[choice.index] = CompletionLogprobsBuilder(
                self.tokenizer, self.options.logprobs or 0, len(self._echo(choice)), self.options.skip_special
            )
        return builder.build(chunk.token_ids, chunk.logprobs)

    def whole(self, collected: list[CollectedText], usage: Usage) -> CompletionAnswer:
        """Return the whole answer."""
        choices = [
            CompletionChoice(text=self._echo(each.choice) + each.text, **self.ending(each)) for each in collected
        ]
        options = self.options
        return CompletionAnswer(
            id=options.response_id, created=options.created, model=options.model, choices=choices, usage=usage
        )

    def _echo(self, choice: ChoiceStream) -> str:
        return "" if self._echoes is None else self._echoes[choice.prompt_index]
