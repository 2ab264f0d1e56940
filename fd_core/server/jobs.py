"""From a decoded request and its prompts to a `Job`, the same for both APIs."""

from __future__ import annotations

from fastapi import Request

from fd_core.server.errors import invalid
from fd_core.server.generation import Job, TextRules
from fd_core.server.request_schemas import GenerationRequest
from fd_core.server.sampling import sampling_params, stop_strings
from fd_core.server.state import ServerState

__all__ = ["build_job", "check_stream"]


def build_job(
    state: ServerState,
    body: GenerationRequest,
    request: Request,
    prompts: list[tuple[int, ...]],
    n: int,
    logprobs: int | None,
    prefill_at: str = "",
) -> Job:
    """Return what the request wants generated; `ApiError` (400) names a field that does not fit the model.

    `prefill_at` is `host:port` of the prefill worker that computes the prompts, empty to compute them here.
    """
    rules = TextRules(stop_strings(body), bool(body.include_stop_str_in_output), body.skip_special_tokens is not False)
    return Job(
        request_id=request.state.request_id,
        arrived=request.state.arrived,
        prompts=prompts,
        params=sampling_params(body, state.client.info, prompts, logprobs),
        n=n,
        rules=rules,
        every_token=logprobs is not None or bool(body.return_token_ids),
        priority=body.priority or 0,
        tenant=body.user or "",
        cache_salt=body.cache_salt or "",
        prefill_at=prefill_at,
    )


def check_stream(body: GenerationRequest) -> bool:
    """Return whether the stream tells its usage; `ApiError` (400) for stream_options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is given, but stream is not true", "stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)
