"""Conversion of a decoded request to a `Job`: prompts, sampling, structured output, tools, and contents of the answer.

Tools determine the prompt, the parser of its answer, and grammars that force the required calls.
`fd_core.text.prompt_reader` makes prompts token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from fastapi import Request

from fd_core.disagg.ticket import TICKET_HEADER, read_ticket
from fd_core.errors import BadRequest
from fd_core.http.access.keys import scoped
from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ApiError, invalid, required, to_api_error, unsupported
from fd_core.http.spans import TRACE_HEADERS
from fd_core.models.families.image_processor import ProcessedImage
from fd_core.server.preprocess.media.reader import ImageReader, RequestedImage
from fd_core.server.preprocess.sampling import asked_tokens, sampling_params, stop_strings, text_cost
from fd_core.server.preprocess.structured_fields import check_logprobs, check_prompt_logprobs, requested_constraint
from fd_core.server.schemas import requests
from fd_core.server.state import ServedName, ServerState
from fd_core.structured.grammar import CallsConstraint, RequestedCall, RequestedConstraint
from fd_core.structured.workers.messages import ConstraintOutcome, Unenforced
from fd_core.text.chat_template import shown_tool
from fd_core.text.parsing.answer import AnswerReading, Parsers
from fd_core.text.parsing.contract import ReasoningParser, ToolParser
from fd_core.text.prompt_reader import PromptReader, PromptText, template_kwargs
from fd_core.types import Image, Reasoning, SamplingParams
from fd_core.types.checks import check_ids, check_structure

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_PLAIN_TURNS: Final = 64
"""Most messages of a conversation that is rendered on the event loop."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_ANY_TEXT = ConstraintOutcome()
_ALIASES: Final = {
    "min_new_tokens": "min_tokens",
    "thinking_token_budget": "reasoning_max_tokens",
    "prompt_token_ids": "(prompt|messages)",
}
_OF_TOOLS: Final = {r"(tools\[\d*\]|tool_choice)\.function": r"\1"}
RESPONSES_NAMES: Final = {"max_completion_tokens": "max_output_tokens", "messages": "input", **_OF_TOOLS}
"""Names of chat fields in the Responses API, by patterns that match the beginning of a field path."""
MESSAGES_NAMES: Final = {r"(tools\[\d*\])\.function\.parameters": r"\1.input_schema", **_OF_TOOLS}
"""The same for the Messages API."""


class OfferedTools(NamedTuple):
    """The tools that a model may call."""

    shown: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments, by name."""
    forced: Sequence[str]
    """Names of the tools of which one must be called; empty if the model may choose."""
    strict: frozenset[str]
    """Names of tools whose arguments must match their schema in every call."""


def offered_tools(
    body: requests.ChatRequest | requests.TokenizeRequest, longest_name: int = requests.MAX_TOOL_NAME
) -> OfferedTools | None:
    """Return the tools that may be called, None if none; `ApiError` (400) for unusable names and choices."""
    choice, schemas = body.tool_choice, {}
    for index, tool in enumerate(body.tools or ()):
        place, name = f"tools[{index}]", tool.function.name
        if tool.type != "function":
            raise invalid(f"{place}.type is {tool.type[:40]!r}; expected 'function'", f"{place}.type", "invalid_value")
        if len(name) > longest_name or not _NAME.fullmatch(name):
            message = f"{place}.function.name must be 1 to {longest_name} letters, digits, '_', '-' or '.'"
            raise invalid(message, f"{place}.function.name")
        if name in schemas:
            raise invalid(
                f"{place}.function.name {name!r} is a duplicate; tool names must be unique", f"{place}.function.name"
            )
        schemas[name] = tool.function.parameters or {"type": "object", "properties": {}}
    forced = _forced(choice, schemas)
    if choice == "none" or not schemas:
        return None
    shown = [shown_tool({"function": msgspec.structs.asdict(tool.function)}) for tool in body.tools or ()]
    strict = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    return OfferedTools(shown, schemas, forced, strict=strict)


def answer_reading(state: ServerState, body: requests.ChatRequest, tools: OfferedTools | None) -> AnswerReading:
    """Return the parsers of answers. Raises `ApiError` (400) for tools if the server has no tool parser."""
    parsers = state.parsers
    if tools is not None and parsers.tools is None:
        raise unsupported(
            "tools are not supported: no tool parser is known for this model; start the server with --tool-call-parser",
            "tools",
        )
    parallel, shows_reasoning = body.parallel_tool_calls is not False, body.include_reasoning is not False
    goes_on = body.continue_final_message or body.disable_chat_template
    continues = bool(goes_on and body.messages and body.messages[-1].content)
    if tools is None:
        return AnswerReading(parsers.reasoning, None, {}, parallel, shows_reasoning, continues)
    return AnswerReading(parsers.reasoning, parsers.tools, tools.schemas, parallel, shows_reasoning, continues)


def _forced(choice: requests.ToolChoice | None, schemas: Mapping[str, Any]) -> Sequence[str]:
    if isinstance(choice, str) or choice is None:
        if choice not in (None, "none", "auto", "required"):
            raise invalid(f"tool_choice is {choice[:40]!r}; expected none, auto, required or a tool", "tool_choice")
        if choice == "required" and not schemas:
            raise invalid("tool_choice requires a call, but tools is empty", "tool_choice")
        return list(schemas) if choice == "required" else ()
    name = choice.function.name
    if choice.type != "function" or name not in schemas:
        raise invalid(f"tool_choice names {name[:64]!r}, which is not in tools", "tool_choice.function.name")
    return [name]


def required_constraint(
    state: ServerState, tools: OfferedTools | None, reading: AnswerReading | None, form: RequestedConstraint | None
) -> RequestedConstraint | None:
    """Return the output constraint for required calls and for the rest of the answer; None if there is none."""
    if tools is None or reading is None or reading.tools is None or not (tools.forced or tools.strict or form):
        return None
    parser, field = reading.tools, "tool_choice" if tools.forced else "tools[].function.strict"
    if form is not None and tools.forced:
        raise invalid(f"{form.field} cannot be combined with required tool calls", form.field)
    if form is not None and not tools.strict:
        field = form.field
    calls = [
        _asked(parser, tools, name, index=index, field=field)
        for index, name in enumerate(tools.schemas)
        if not tools.forced or name in tools.forced
    ]
    calls_constraint = CallsConstraint(
        calls=calls,
        control_tokens=state.tokenizer.control_tokens,
        is_demanded=bool(tools.forced) or form is not None,
        before=parser.before_calls,
        markers=parser.markers,
        answer_begin=parser.answer_begin,
        several=(form is not None or len(tools.forced) > 1) and reading.parallel,
        space=reading.reasoning is not None and not parser.reads_reasoning,
        instead=form,
    )
    return RequestedConstraint("tools", calls_constraint)


def constrained(
    state: ServerState,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    *,
    reading: AnswerReading | None,
    budget: int | None,
    called: bool,
) -> list[SamplingParams]:
    """Return parameters with reasoning before any grammar and within `budget`. Raises `ApiError` (400)."""
    parser = None if reading is None else reading.reasoning
    if called and reading is not None and reading.tools is not None and reading.tools.reads_reasoning:
        if budget is not None:
            raise unsupported(
                "reasoning_max_tokens cannot be combined with required or strict calls for this model, because its "
                "reasoning is part of their grammar; remove one of them",
                "reasoning_max_tokens",
            )
        parser = None  # its grammar begins with the reasoning
    held = []
    for prompt, given in zip(prompts, params, strict=True):
        tail = "" if reading is None else reading.prompt_tail(state.tokenizer, prompt)
        held.append(msgspec.structs.replace(given, reasoning=_reasoning(state, parser, tail, budget=budget)))
    return held


def _reasoning(
    state: ServerState, parser: type[ReasoningParser] | None, tail: str, budget: int | None
) -> Reasoning | None:
    if parser is None or not parser.end:
        if budget is None:
            return None
        raise unsupported(
            "reasoning_max_tokens is not supported: no reasoning parser is known for this model; start the server "
            "with --reasoning-parser",
            "reasoning_max_tokens",
        )
    if not parser.begins_reasoning(tail, state.prompt_reader.switches_reasoning):
        return None
    end = tuple(state.tokenizer.encode(parser.end, add_special=False))
    check_ids(end, state.client.info.vocab_size, "the end of reasoning", text_of=state.tokenizer.token_text)
    return Reasoning(end=end, max_tokens=budget)


def _asked(parser: type[ToolParser], tools: OfferedTools, name: str, index: int, field: str) -> RequestedCall:
    form = parser.form(name)
    if form is None:
        raise unsupported(
            f"{field} needs calls constrained by a grammar, which is not supported for the call format of this model; "
            "use tool_choice auto, without strict and without another output constraint",
            field,
        )
    keeps = name in tools.strict or name in tools.forced
    schema = dict(tools.schemas[name]) if keeps else {"type": "object"}
    return RequestedCall(form, schema, f"tools[{index}].function.parameters", name=name, is_strict=name in tools.strict)


class PromptState(Protocol):
    """State needed to read prompts, at a server and at a router that counts the tokens its workers will read."""

    prompt_reader: PromptReader
    parsers: Parsers

    @property
    def images(self) -> ImageReader | None:
        """Reader of images; None if the model takes none, and at a router, which replaces them by texts."""

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and text together; None if a router does not know it."""

    @property
    def max_n(self) -> int:
        """Most texts per request."""

    @property
    def trusts_templates(self) -> bool:
        """True if requests may supply a chat template."""


async def completion_prompts(state: PromptState, body: requests.CompletionRequest) -> list[PromptText]:
    """Return prompts: texts or ids; `ApiError` (400) for too many, `BadRequest` for unreadable ones."""
    by_ids = bool(body.prompt_token_ids) or body.prompt is None  # an empty list requests nothing
    reader, field = state.prompt_reader, "prompt_token_ids" if by_ids else "prompt"
    given = required(body.prompt_token_ids if by_ids else body.prompt, "prompt")
    texts = [given] if isinstance(given, str) else [each for each in given if not isinstance(each, int)]
    if len(texts) > (most := state.max_n):
        raise invalid(f"{field} has {len(texts)} prompts; at most {most} are allowed per request", field)
    size = sum(len(each) for each in texts if isinstance(each, str))
    read = await reader.run(size, lambda: reader.completion(given, body.add_special_tokens is not False, field))
    return [_shortened(state, body, each) for each in read]


async def chat_prompt(
    state: PromptState,
    body: requests.ChatRequest | requests.TokenizeRequest,
    tools: OfferedTools | msgspec.UnsetType | None = msgspec.UNSET,
) -> PromptText:
    """Return a request's prompt. Raises `ApiError` (400), and `BadRequest` of the template and of images."""
    reader = state.prompt_reader
    if isinstance(body, requests.ChatRequest) and (body.prompt_token_ids or body.disable_chat_template):
        if body.prompt_token_ids:
            ids = reader.given(body.prompt_token_ids, "prompt_token_ids")
        else:
            messages, special = body.messages or [], body.add_special_tokens is not False
            if len(messages) != 1 or not isinstance(text := messages[0].content, str):
                raise invalid(
                    f"disable_chat_template needs exactly one message, with text content; messages has {len(messages)}",
                    "messages",
                )
            ids = await reader.run(len(text), lambda: reader.text(text, special, "messages"))
        return _shortened(state, body, PromptText(ids, None))
    if body.messages is None:
        raise invalid("messages is required", "messages", "missing_required_parameter")
    turns: list[dict[str, Any]] = []
    images: list[RequestedImage] = []
    for index, message in enumerate(body.messages):
        if message.role != "user" or message.content is None or message.tool_calls or message.function_call:
            _check(f"messages[{index}]", message)
        turn = msgspec.to_builtins(message)
        if isinstance(message.content, list) and (found := _images(message.content, f"messages[{index}].content")):
            images += found.values()
            turn["content"] = [
                {"type": "image"} if number in found else part for number, part in enumerate(turn["content"])
            ]
        turn["reasoning_content"] = message.reasoning_content or message.reasoning
        turns.append(turn)
    template = body.chat_template or None
    own = template is not None and state.prompt_reader.own_template(template) is not None
    if template is not None and not own and not state.trusts_templates:
        raise unsupported(
            "chat_template in requests is disabled; start the server with --trust-request-chat-template",
            "chat_template",
        )
    effort = body.reasoning_effort
    if template is None and effort is not None:
        require_effort(reader, effort, "reasoning_effort")
    if tools is msgspec.UNSET:
        tools = offered_tools(body)
    variables: Mapping[str, Any] | None = body.chat_template_kwargs
    if body.enable_thinking is not None or effort is not None:
        variables = template_kwargs(variables, body.enable_thinking, effort)
    processed: list[ProcessedImage] = []
    if images:
        if state.images is None:
            raise unsupported(f"{images[0].field}: this model takes no images", images[0].field)
        if not isinstance(body, requests.TokenizeRequest) and body.truncate_prompt_tokens is not None:
            raise unsupported("truncate_prompt_tokens is not supported with images", "truncate_prompt_tokens")
        processed = await state.images.read(images)
    size = sum([len(str(turn["content"])) for turn in turns])
    read = partial(
        reader.chat,
        turns,
        body.add_generation_prompt,
        variables,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        template=template,
        add_special=bool(body.add_special_tokens),
        tools=None if tools is None else tools.shown,
        images=processed,
    )
    if tools is not None:
        size += len(msgspec.json.encode(tools.shown))
    is_plain = (
        len(turns) <= _PLAIN_TURNS
        and (tools is None and variables is None and template is None and body.documents is None)
        and all(isinstance(each.content, str) and not each.tool_calls for each in body.messages)
    )
    prompt = await reader.render(size, read, is_plain=is_plain)
    if isinstance(body, requests.TokenizeRequest) or body.truncate_prompt_tokens is None:
        return prompt
    return _shortened(state, body, prompt)


def _images(parts: Sequence[requests.ContentPart], place: str) -> dict[int, RequestedImage]:
    """Return the images of a message's parts by their indices."""
    found = {}
    for index, part in enumerate(parts):
        if part.type != "image_url":
            continue
        given, field = part.image_url, f"{place}[{index}].image_url"
        if isinstance(part, requests.ImagePart):
            field = part.field
        elif isinstance(given, requests.ImageUrl):
            given, field = given.url, f"{field}.url"
        found[index] = RequestedImage(str(required(given, field)), field)
    return found


def require_role(role: str, field: str) -> None:
    """Raise `ApiError` (400) that names `field` for a role that is not supported."""
    if role not in _ROLES:
        raise invalid(f"{field} is {role[:40]!r}; expected {', '.join(_ROLES)}", field, "invalid_value")


def require_effort(reader: PromptReader, effort: str | None, field: str) -> None:
    """Raise `ApiError` (400) for an effort that the model does not support; `none` and `medium` need no support."""
    if effort not in (None, "none", "medium") and not reader.supports_effort:
        raise unsupported(f"{field} is not supported by the chat template of this model", field)


def _shortened(state: PromptState, body: requests.GenerationRequest, prompt: PromptText) -> PromptText:
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == 0:
        raise invalid("truncate_prompt_tokens is 0; expected -1 or at least 1", "truncate_prompt_tokens")
    if most < 0:
        if state.context is None:
            return prompt
        most = max(1, state.context - (asked_tokens(body)[0] or 1))
    if len(prompt.ids) <= most:
        return prompt
    return PromptText(prompt.ids[:most] if body.truncation_side == "right" else prompt.ids[-most:], None)


def _check(place: str, message: requests.Message) -> None:
    require_role(message.role, f"{place}.role")
    if message.function_call:
        raise unsupported(f"{place}.function_call: use tool_calls", f"{place}.function_call")
    if message.tool_calls and message.role != "assistant":
        raise invalid(
            f"{place}.tool_calls: only messages of the assistant may have tool calls",
            f"{place}.tool_calls",
            "invalid_value",
        )
    if message.role != "assistant":
        required(message.content, f"{place}.content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A validated request: all generations of one HTTP request, and the contents of its answer."""

    record: RequestRecord
    owner: str
    """Owner of the request, see `ApiKey.owner`."""
    arrived: float
    """Time at which the server received the request, in seconds of `time.perf_counter`."""
    path: str
    """Path of the API that was called, if spans are made."""
    trace: Mapping[str, str]
    """Headers of the request that name its span, if spans are made."""
    prompts: Sequence[tuple[int, ...]]
    images: tuple[Image, ...]
    """Of the only prompt."""
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
    """Parsers of the answer's text; None for plain text."""
    logprobs: int | None
    """Most likely tokens shown alongside each chosen token; None shows no log-probabilities."""
    prompt_logprobs: int | None
    """Most likely tokens shown alongside each token of the prompt; None shows none."""
    token_ids: bool
    tokens_as_ids: bool
    usage_in_stream: bool
    usage_in_events: bool
    prompt_only: bool
    """True if the answer contains no generated text: one token is computed and dropped."""
    warnings: tuple[Unenforced, ...]

    @property
    def warned(self) -> list[Unenforced] | msgspec.UnsetType:
        """The warnings as answers show them."""
        return list(self.warnings) or msgspec.UNSET

    @property
    def bare_ids(self) -> bool:
        """True if the model's template requires bare call ids."""
        return self.reading is not None and self.reading.tools is not None and self.reading.tools.bare_ids


async def conversation_job(
    state: ServerState,
    body: requests.ChatRequest,
    request: Request,
    form: RequestedConstraint | None = None,
    names: Mapping[str, str] | None = None,
) -> Job:
    """Return the validated job of a conversation; errors name the client's field, by `names`."""
    try:
        form = form or requested_constraint(body)
        served = state.served(body.model)
        state.admit(1)
        if body.top_logprobs and not body.logprobs:
            raise invalid(f"top_logprobs={body.top_logprobs} requires logprobs=true", "top_logprobs")
        outcome = _ANY_TEXT if form is None else await state.grammars.checked(form)
        tools = None
        if body.tools or body.tool_choice is not None:
            tools = offered_tools(body, requests.CHAT.tool_name if names is None else requests.MAX_TOOL_NAME)
        reading = AnswerReading(None, None, {}) if names is not None else None
        if tools is not None or state.parsers.reasoning is not None:
            reading = answer_reading(state, body, tools)
        calls = None if tools is None else required_constraint(state, tools, reading, form=form)
        if calls is not None:
            outcome = await state.grammars.checked(calls)
        # A model that generates no text may have no chat template; `build_job` refuses it.
        prompt = await chat_prompt(state, body, tools) if state.client.info.generates else PromptText((), None)
        return build_job(
            state,
            request,
            body,
            served=served,
            prompts=[prompt.ids],
            images=prompt.images,
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
    body: requests.GenerationRequest,
    served: ServedName,
    prompts: Sequence[tuple[int, ...]],
    *,
    images: tuple[Image, ...] = (),
    logprobs: int | None,
    reading: AnswerReading | None = None,
    outcome: ConstraintOutcome = _ANY_TEXT,
    called: bool = False,
    names: Mapping[str, str] | None = None,
) -> Job:
    """Return the job of a request; `ApiError` (400, 403) if it is not valid for the model or this worker."""
    options, info = body.stream_options, state.client.info
    if options is not None and not body.stream:
        raise invalid("stream_options requires stream=true", "stream_options")
    if not info.generates:
        raise invalid(
            "this checkpoint has no output projection and cannot generate text; use /v1/embeddings", "model", "no_texts"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not supported with stream; remove stream, or use echo", "prompt_logprobs")
    if body.prompt_logprobs is not None and images:
        raise unsupported("prompt_logprobs is not supported with images", "prompt_logprobs")
    for name, top in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if top is not None and top > (most := state.config.max_logprobs):
            raise invalid(f"{name}={top} exceeds the limit {most} of this server", name)
    record, owner, headers = request.state.record, request.state.owner, request.headers
    cost = text_cost(
        body,
        [len(each) for each in prompts],
        most_texts=state.config.max_n,
        context=info.max_model_len,
        limit=record.tokens_per_minute if owner else None,
        default_tokens=info.generation.max_new_tokens,
    )
    params = sampling_params(body, info, cost.outputs, logprobs=logprobs, tokenizer=state.tokenizer)
    if params[0].prompt_logprobs is not None:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_prompt_logprobs(params[0].prompt_logprobs, sum(map(len, prompts)) * cost.n, name)
    if logprobs is not None:
        check_logprobs(logprobs, [each.max_tokens for each in params], cost.n, context=info.max_model_len)
    stop = stop_strings(body) if body.stop else ()
    peer = _prefill_peer(state, request, ticket) if (ticket := headers.get(TICKET_HEADER)) is not None else ""
    warnings: tuple[Unenforced, ...] = ()
    if outcome.grammar:
        params = [msgspec.structs.replace(each, grammar=outcome.grammar) for each in params]
        sent = other_names(body) if names is None else names
        warnings = tuple(Unenforced(*as_sent(each.param, each.message, sent)) for each in outcome.warnings)
    budget = body.reasoning_max_tokens if isinstance(body, requests.ChatRequest) else None
    if isinstance(body, requests.ChatRequest) and (other := body.thinking_token_budget) is not None:
        if budget not in (None, other):
            raise invalid(
                "reasoning_max_tokens and thinking_token_budget differ; specify only one", "thinking_token_budget"
            )
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
        images=images,
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
    """Return `host:port` of the prefill worker from the signed header. `ApiError` if this worker cannot use it."""
    if state.client.info.role != "decode" or state.ticket_key is None:
        message = f"{TICKET_HEADER} names a prefill worker, but this worker was not started with --role decode"
        raise ApiError(400, message, code="not_a_decode_worker")
    peer = read_ticket(state.ticket_key, request.state.request_id, ticket)
    if peer is None:
        message = (
            f"{TICKET_HEADER} is not signed with this worker's secret; start the router and all workers with the same "
            "--transfer-secret-file"
        )
        raise ApiError(403, message, code="bad_ticket")
    return peer


def other_names(body: requests.GenerationRequest) -> Mapping[str, str]:
    """Return the names that a request uses instead of the usual ones, by patterns of those."""
    return {usual: name for name, usual in _ALIASES.items() if getattr(body, name, None) is not None}


def named_as_sent(error: ApiError | BadRequest, names: Mapping[str, str]) -> ApiError:
    """Return an error with the field name that the client used."""
    api_error = to_api_error(error)
    if api_error.param:
        api_error.param, api_error.message = as_sent(api_error.param, api_error.message, names)
    return api_error


def as_sent(param: str, message: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return a field as the client named it, and a message with that name; messages may name enclosing fields."""
    for usual, name in names.items():
        if found := re.match(rf"{usual}\b", param):
            begin = found.expand(name)
            sent = begin + param[found.end() :]
            return sent, message.replace(param, sent) if param in message else message.replace(found[0], begin)
    return param, message
