"""From a decoded request and its prompts to a `Job`, the same for both APIs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from fastapi import Request

from fd_core.disagg.ticket import TICKET_HEADER, read_ticket
from fd_core.http.access.keys import scoped
from fd_core.http.errors import ApiError, invalid
from fd_core.http.spans import TRACE_HEADERS
from fd_core.server.preprocess.evaluation_fields import check_logprobs, check_prompt_logprobs
from fd_core.server.preprocess.sampling import bad_word_ids, sampling_params, stop_strings, text_cost
from fd_core.server.schemas.requests import GenerationRequest
from fd_core.server.state.state import ServerState
from fd_core.server.stream.generation import Job
from fd_core.structured.workers.messages import FormOutcome
from fd_core.text.parsing.answer import AnswerReading

__all__ = ["build_job", "with_grammar"]


def build_job(
    state: ServerState,
    body: GenerationRequest,
    request: Request,
    prompts: list[tuple[int, ...]],
    logprobs: int | None,
    reading: AnswerReading | None = None,
) -> Job:
    """Return what the request wants generated; `ApiError` (400, 403) for what does not fit the model or this worker."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is given, but stream is not true", "stream_options")
    if not state.client.info.generates:
        raise invalid("this checkpoint has no output projection; it serves /v1/embeddings", "model", "no_texts")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not told in a stream; leave stream out, or use echo", "prompt_logprobs")
    field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    for name, top in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if top is not None and top > (most := state.config.max_logprobs):
            raise invalid(f"{name}: {top} likely tokens are asked for; this server tells {most} at most", name)
    record = request.state.record
    cost = text_cost(
        body,
        [len(each) for each in prompts],
        most_texts=state.max_n,
        context=state.context,
        limit=record.tokens_per_minute,
    )
    n = cost.n
    bad_words = bad_word_ids(body, state.client.info, state.tokenizer)
    params = sampling_params(body, state.client.info, cost.outputs, logprobs, bad_words, state.tokenizer)
    check_prompt_logprobs(params[0].prompt_logprobs, sum(map(len, prompts)) * n, field)
    check_logprobs(logprobs, [each.max_tokens for each in params], n, state.client.info.max_model_len)
    return Job(
        request_id=request.state.request_id,
        model=state.model_name(body.model),
        adapter=state.adapter(body.model),
        fingerprint=state.fingerprint,
        arrived=request.state.arrived,
        prompts=prompts,
        params=params,
        n=n,
        most_tokens=cost.tokens,
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage_in_stream=bool(body.stream_options and body.stream_options.include_usage),
        usage_in_events=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        priority=body.priority or 0,
        tenant=scoped(request.state.owner, body.user),
        cache_salt=state.access.salt(request.state.owner, body.cache_salt),
        reading=reading,
        prompt_logprobs=body.prompt_logprobs,
        prompt_only=body.max_tokens == 0,
        path=request.url.path,
        trace={} if state.spans is None else {n: v for n in TRACE_HEADERS if (v := request.headers.get(n))},
        prefill_at=_prefill_peer(state, request),
        owner=request.state.owner,
        record=record,
    )


def with_grammar(job: Job, outcome: FormOutcome) -> Job:
    """Return the job with texts that have to match the grammar of `outcome`; the job itself if it has none."""
    if not outcome.grammar:
        return job
    params = [msgspec.structs.replace(each, grammar=outcome.grammar) for each in job.params]
    return replace(job, params=params, warnings=outcome.warnings)


def _prefill_peer(state: ServerState, request: Request) -> str:
    """Return `host:port` of the prefill worker that computes the prompt, empty if this one does.

    A router names it to a decode worker, in a signed header. Raises `ApiError` for a ticket that was not signed with
    this worker's secret, or that this worker has no use for.
    """
    ticket = request.headers.get(TICKET_HEADER)
    if ticket is None:
        return ""
    if state.client.info.role != "decode" or state.ticket_key is None:
        raise ApiError(
            400,
            f"{TICKET_HEADER} names a prefill worker, but this worker was not started with --role decode",
            code="not_a_decode_worker",
        )
    peer = read_ticket(state.ticket_key, request.state.request_id, ticket)
    if peer is None:
        raise ApiError(
            403,
            f"{TICKET_HEADER} is not signed with this worker's secret: routers, prefill and decode workers need the "
            "same one (--transfer-secret-file)",
            code="bad_ticket",
        )
    return peer
