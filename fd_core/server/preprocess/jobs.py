"""From a decoded request to a `Job`: prompts, sampling, structured output, tools, and what the answer shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from fastapi import Request

from fd_core.disagg.ticket import TICKET_HEADER, read_ticket
from fd_core.errors import BadRequest
from fd_core.http.access.keys import scoped
from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ApiError, invalid, to_api_error
from fd_core.http.spans import TRACE_HEADERS
from fd_core.server.preprocess.prompts import answer_reading, chat_prompt, constrained, demanded_form, offered_tools
from fd_core.server.preprocess.sampling import sampling_params, stop_strings, text_cost
from fd_core.server.preprocess.structured_fields import check_logprobs, check_prompt_logprobs, form_asked
from fd_core.server.schemas.requests import CHAT, MAX_TOOL_NAME, ChatRequest, GenerationRequest
from fd_core.server.state.state import ServedName, ServerState
from fd_core.structured.grammar import FormAsked
from fd_core.structured.workers.messages import FormOutcome, Unenforced
from fd_core.text.parsing.answer import AnswerReading
from fd_core.types import SamplingParams
from fd_core.types.checks import check_structure

_ANY_TEXT = FormOutcome()
_ALIASES: Final = {
    "min_new_tokens": "min_tokens",
    "thinking_token_budget": "reasoning_max_tokens",
    "prompt_token_ids": "(prompt|messages)",
}
_OF_TOOLS: Final = {r"(tools\[\d*\]|tool_choice)\.function": r"\1"}
RESPONSES_NAMES: Final = {"max_completion_tokens": "max_output_tokens", "messages": "input", **_OF_TOOLS}
"""What the Responses API calls fields of a chat, by patterns that match their beginnings."""
MESSAGES_NAMES: Final = {r"(tools\[\d*\])\.function\.parameters": r"\1.input_schema", **_OF_TOOLS}
"""The same for the Messages API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: everything that one HTTP request wants generated, and what its answer shows."""

    record: RequestRecord
    """Told what was read and written."""
    owner: str
    """Whose request it is, see `ApiKey.owner`."""
    arrived: float
    """When the server received the request, in seconds of `time.perf_counter`."""
    path: str
    """Path of the API that was called, if spans are made."""
    trace: Mapping[str, str]
    """Headers of the request that name its span, if spans are made."""
    prompts: Sequence[tuple[int, ...]]
    params: Sequence[SamplingParams]
    """For each prompt; the seed is that of its first choice."""
    n: int
    """Choices of each prompt; choice `j` of prompt `i` has index `i * n + j`."""
    most_tokens: int
    """The most that can be read and written."""
    priority: int
    tenant: str
    cache_salt: str
    served: ServedName
    prefill_at: str
    """`host:port` of the prefill worker that computes the prompts; empty computes them here."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    reading: AnswerReading | None
    """How answers are read; None for plain text."""
    logprobs: int | None
    """Most likely tokens shown beside each chosen token; None shows no log-probabilities."""
    prompt_logprobs: int | None
    """Most likely tokens shown beside each token of the prompt; None shows none."""
    token_ids: bool
    tokens_as_ids: bool
    """Whether log-probabilities name tokens by their ids."""
    usage_in_stream: bool
    """Whether a last event of a stream tells the usage."""
    usage_in_events: bool
    """Whether every event of a stream tells the usage so far."""
    prompt_only: bool
    """Whether the answer shows nothing of the text: one token is computed and dropped."""
    warnings: tuple[Unenforced, ...]
    """Parts of schemas that the answer may not keep."""

    @property
    def warned(self) -> list[Unenforced] | msgspec.UnsetType:
        """The warnings as answers show them."""
        return list(self.warnings) or msgspec.UNSET

    @property
    def bare_ids(self) -> bool:
        """Whether the model's template demands bare ids of calls."""
        return self.reading is not None and self.reading.tools is not None and self.reading.tools.bare_ids


async def conversation_job(
    state: ServerState,
    body: ChatRequest,
    request: Request,
    form: FormAsked | None = None,
    names: Mapping[str, str] | None = None,
) -> Job:
    """Return what a conversation wants generated, with all checks; `form` is what its answer has to match.

    The other families say what they want as such a request, with the `names` of their fields, and get their answers as
    events in any case. Raises `ApiError`, whose field has the name that the client gave it.
    """
    try:
        form = form or form_asked(body)
        served = state.served(body.model)
        state.admit(1)
        if body.top_logprobs and not body.logprobs:
            raise invalid(f"top_logprobs is {body.top_logprobs}, which needs logprobs to be true", "top_logprobs")
        outcome = _ANY_TEXT if form is None else await state.grammars.checked(form)
        tools = None
        if body.tools or body.tool_choice is not None:
            tools = offered_tools(body, CHAT.tool_name if names is None else MAX_TOOL_NAME)
        reading = AnswerReading(None, None, {}) if names is not None else None
        if tools is not None or state.parsers.reasoning is not None:
            reading = answer_reading(state, body, tools)
        calls = None if tools is None else demanded_form(state, tools, reading, form)
        if calls is not None:
            outcome = await state.grammars.checked(calls)
        prompt = await chat_prompt(state, body, tools)
        return build_job(
            state,
            request,
            body,
            served,
            [prompt],
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            reading=reading,
            outcome=outcome,
            called=calls is not None,
            names=names,
        )
    except (ApiError, BadRequest) as error:
        raise named_as_sent(error, other_names(body) if names is None else names) from None


def build_job(
    state: ServerState,
    request: Request,
    body: GenerationRequest,
    served: ServedName,
    prompts: Sequence[tuple[int, ...]],
    *,
    logprobs: int | None,
    reading: AnswerReading | None = None,
    outcome: FormOutcome = _ANY_TEXT,
    called: bool = False,
    names: Mapping[str, str] | None = None,
) -> Job:
    """Return what the request wants generated; `ApiError` (400, 403) for what does not fit the model or this worker.

    `outcome` is the grammar that texts have to match, of calls if it is `called`. `names` are as in `conversation_job`.
    """
    options, info = body.stream_options, state.client.info
    if options is not None and not body.stream:
        raise invalid("stream_options is given, but stream is not true", "stream_options")
    if not info.generates:
        raise invalid("this checkpoint has no output projection; it serves /v1/embeddings", "model", "no_texts")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not told in a stream; leave stream out, or use echo", "prompt_logprobs")
    for name, top in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if top is not None and top > (most := state.config.max_logprobs):
            raise invalid(f"{name}: {top} likely tokens are asked for; this server tells {most} at most", name)
    record, owner, headers = request.state.record, request.state.owner, request.headers
    cost = text_cost(
        body,
        [len(each) for each in prompts],
        most_texts=state.config.max_n,
        context=info.max_model_len,
        limit=record.tokens_per_minute if owner else None,
    )
    params = sampling_params(body, info, cost.outputs, logprobs, state.tokenizer)
    if params[0].prompt_logprobs is not None:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_prompt_logprobs(params[0].prompt_logprobs, sum(map(len, prompts)) * cost.n, name)
    if logprobs is not None:
        check_logprobs(logprobs, [each.max_tokens for each in params], cost.n, info.max_model_len)
    stop = stop_strings(body) if body.stop else ()
    peer = _prefill_peer(state, request, ticket) if (ticket := headers.get(TICKET_HEADER)) is not None else ""
    warnings: tuple[Unenforced, ...] = ()
    if outcome.grammar:
        params = [msgspec.structs.replace(each, grammar=outcome.grammar) for each in params]
        sent = other_names(body) if names is None else names
        warnings = tuple(Unenforced(*as_sent(each.param, each.message, sent)) for each in outcome.warnings)
    budget = body.reasoning_max_tokens if isinstance(body, ChatRequest) else None
    if isinstance(body, ChatRequest) and (other := body.thinking_token_budget) is not None:
        if budget not in (None, other):
            raise invalid("reasoning_max_tokens and thinking_token_budget differ; give one", "thinking_token_budget")
        budget = other
    if outcome.grammar or budget is not None:
        params = constrained(state, prompts, params, reading=reading, budget=budget, called=called)
        check_structure(params[0])
    return Job(
        record=record,
        owner=owner,
        arrived=request.state.arrived,
        path=request.url.path if state.spans is not None else "",
        trace={} if state.spans is None else {n: v for n in TRACE_HEADERS if (v := headers.get(n))},
        prompts=prompts,
        params=params,
        n=cost.n,
        most_tokens=cost.tokens,
        priority=body.priority or 0,
        tenant=scoped(owner, body.user) if owner else body.user or "",
        cache_salt=state.access.salt(owner, body.cache_salt),
        served=served,
        prefill_at=peer,
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        reading=reading,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage_in_stream=bool(options and options.include_usage),
        usage_in_events=bool(options and options.continuous_usage_stats),
        prompt_only=body.max_tokens == 0,
        warnings=warnings,
    )


def _prefill_peer(state: ServerState, request: Request, ticket: str) -> str:
    """Return `host:port` of the prefill worker that computes the prompt.

    A router names it to a decode worker, in a signed header. Raises `ApiError` for a ticket that was not signed with
    this worker's secret, or that this worker has no use for.
    """
    if state.client.info.role != "decode" or state.ticket_key is None:
        message = f"{TICKET_HEADER} names a prefill worker, but this worker was not started with --role decode"
        raise ApiError(400, message, code="not_a_decode_worker")
    peer = read_ticket(state.ticket_key, request.state.request_id, ticket)
    if peer is None:
        raise ApiError(
            403,
            f"{TICKET_HEADER} is not signed with this worker's secret: routers, prefill and decode workers need the "
            "same one (--transfer-secret-file)",
            code="bad_ticket",
        )
    return peer


def other_names(body: GenerationRequest) -> Mapping[str, str]:
    """Return the names that a request uses instead of the usual ones, by patterns of those."""
    return {usual: name for name, usual in _ALIASES.items() if getattr(body, name, None) is not None}


def named_as_sent(error: ApiError | BadRequest, names: Mapping[str, str]) -> ApiError:
    """Return an error that names its field as the client did."""
    told = to_api_error(error)
    if told.param:
        told.param, told.message = as_sent(told.param, told.message, names)
    return told


def as_sent(param: str, message: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return a field as the client named it, and a message with that name; messages may name what stands around it."""
    for usual, name in names.items():
        if found := re.match(rf"{usual}\b", param):
            begin = found.expand(name)
            sent = begin + param[found.end() :]
            return sent, message.replace(param, sent) if param in message else message.replace(found[0], begin)
    return param, message
