"""Forwarding of one request: attempts on one worker after the other, then the answer."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping
from typing import Final, get_args
from urllib.parse import urlsplit

import msgspec

from fd_core.disagg import keys
from fd_core.disagg.ticket import OUTCOME_HEADER, TICKET_HEADER, sign_ticket
from fd_core.errors import ConfigError
from fd_core.http.access.control import limit_headers
from fd_core.http.access.record import TENANT_HEADER, USAGE_HEADER, RequestRecord, Tenant, UsageMeter, sign_tenant
from fd_core.http.bodies import BodyShare
from fd_core.http.draining import DRAINING_HEADER
from fd_core.http.errors import OLLAMA_PATH, ApiError, unavailable
from fd_core.http.headers import length_of, refuse_encoding
from fd_core.http.spans import RequestSpan, RequestSpans, span_name
from fd_core.router.attempts import Attempts, is_refusal
from fd_core.router.config import GatewayConfig
from fd_core.router.gateway.http1.clients import ClientRequest, WholeAnswer, error_answer
from fd_core.router.gateway.http1.heads import HOP_BY_HOP, Headers, forwarded
from fd_core.router.gateway.http1.workers import (
    UPSTREAM_ERRORS,
    WorkerAnswer,
    WorkerUnreachable,
    is_resource_exhaustion,
)
from fd_core.router.gateway.requests import relaying
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.selection import NoWorker, RouteRequest, Selection
from fd_core.types import PrefillOutcome

_NO_MODEL: Final = (b'"model_not_found"', b'"not_found_error"')
"""Error codes of workers for an unknown model, in OpenAI's and in Anthropic's format."""
_ELSEWHERE_BYTES: Final = 64 * 1024
"""Bytes of an error response that are kept for the client in case all retries fail."""
_ENDS_WITH_DONE: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate"})

_ENDS: Final[Mapping[str | None, str]] = {"failed": "worker_failed", "declined": "worker_declined"}
"""Error of the span of an attempt, by verdict."""


def error_event(error: ApiError, path: str) -> bytes:
    """Return an error as the last event of a stream from `path`, which no `[DONE]` follows."""
    body = error.body_at(path)
    return body + b"\n" if path.startswith(OLLAMA_PATH) else b"event: error\ndata: " + body + b"\n\n"


def refusal(answer: NoWorker) -> ApiError:
    """Return the error for a client whose request was assigned no worker."""
    wait = answer.retry_after if answer.retry_after is not None else 1.0
    seconds = max(1, math.ceil(wait))
    if answer.status == 503:
        return unavailable(answer.message, answer.reason, retry_after=seconds)
    kind = "rate_limit_error" if answer.status == 429 else "server_error"
    headers = {"Retry-After": str(seconds)} if answer.status == 429 or answer.retry_after is not None else {}
    return ApiError(answer.status, answer.message, kind=kind, code=answer.reason, headers=headers)


def lost() -> ApiError:
    """Return the error for a client whose answer is incomplete; the client may retry, the gateway must not."""
    message = "the worker was lost during the answer, which is incomplete; retry the request"
    return ApiError(502, message, kind="server_error", code="worker_lost")


async def read_body(request: ClientRequest, share: BodyShare) -> bytes:
    """Return the body. Raises `ApiError`: 415 if it is compressed, 400 if incomplete, 413 or 503 beyond its share."""
    if "Content-Encoding" in request.headers:
        refuse_encoding(request.headers.getall("Content-Encoding"))
    body = await request.readany()
    share.received(len(body))
    if not request.has_more:
        return body
    parts = [body]
    while request.has_more and (part := await request.readany()):
        share.received(len(part))
        parts.append(part)
    return b"".join(parts)


_ROUTERS_OWN: Final = frozenset(each.lower() for each in (TICKET_HEADER, OUTCOME_HEADER, USAGE_HEADER, TENANT_HEADER))
"""Headers that only a router may send: a client could redirect a worker, or impersonate another client."""
_REQUEST_ONLY: Final = HOP_BY_HOP | _ROUTERS_OWN | {"host", "origin", "content-length", "expect", "x-request-id"}
ANSWER_ONLY: Final = HOP_BY_HOP | {"content-length", "date", "server", "x-request-id", DRAINING_HEADER.lower()}
"""Headers of a worker's answer that the client does not get."""


def to_worker(state: GatewayState, given: Headers, record: RequestRecord, method: str, path: str) -> Headers:
    """Return headers for a worker: the client's key, or, if that is the gateway's, its signed tenant instead.

    Raises `ApiError` (508) for a request that this gateway has forwarded already: it would be forwarded forever.
    """
    passed = given.getall("Via", [])
    if any(state.name in each for each in passed):
        message = "the request returned to this router; remove the worker whose address is that of a router before it"
        raise ApiError(508, message, kind="server_error", code="routing_loop")
    headers = forwarded(given, _REQUEST_ONLY)
    headers["Via"] = ", ".join((*passed, f"1.1 {state.name}"))
    headers["X-Request-Id"] = record.request_id
    if record.key is not None:
        tenant = Tenant.of(record.key)
        headers[TENANT_HEADER] = sign_tenant(state.worker_secret, tenant, method, path, record.request_id)
    if state.requires_keys:
        headers.popall("Authorization", None)
    if state.requires_keys or "Authorization" in state.own_headers:
        headers.popall("X-Api-Key", None)
    headers.update(state.own_headers)
    return headers


_NOT_REPORTED: Final = "not_told"
"""Outcome if the decode worker reports none: it does not support tickets, or ignores them."""
_OUTCOMES: Final = frozenset(get_args(PrefillOutcome))


def ticket_key(config: GatewayConfig) -> bytes | None:
    """Return the key of tickets, None without pairs. Raises `ConfigError` if a secret that is needed cannot be read."""
    if not (config.prefill or config.transfer_secret_file or config.router_secret):
        return None
    try:
        return keys.ticket_key(config.transfer_secret_file)
    except ConfigError:
        if config.prefill or config.transfer_secret_file:
            raise
        return None


def ticket_headers(state: GatewayState, selection: Selection, headers: Headers, request_id: str) -> Headers:
    """Return the headers of a request, which carries `request_id`; a ticket names the prefill side of a pair."""
    if state.ticket_key is None:
        return headers
    host = urlsplit(selection.prefill.url).hostname or ""
    peer = f"[{host}]:{selection.kv_port}" if ":" in host else f"{host}:{selection.kv_port}"
    signed = headers.copy()
    signed[TICKET_HEADER] = sign_ticket(state.ticket_key, request_id, peer)
    return signed


def outcome_of(headers: Mapping[str, str]) -> str:
    """Return the outcome of a pair's prefill side, from the headers of the decode worker's answer."""
    outcome = headers.get(OUTCOME_HEADER, "")
    return outcome if outcome in _OUTCOMES else _NOT_REPORTED


class Exchange(msgspec.Struct, eq=False):
    """One client's request: sends it to the workers that the router chooses, and reports the outcome to the router."""

    state: GatewayState
    request: ClientRequest
    added: Mapping[str, str]
    """Headers that every answer gets; those of whole answers are added by the gate."""
    headers: Headers
    body: bytes
    share: BodyShare
    """Memory that the body holds."""
    asked: RouteRequest
    arrived: float
    """Time at which the headers of the request were read, by `time.monotonic`."""
    record: RequestRecord
    attempts: Attempts[WholeAnswer]
    meter: UsageMeter | None = None
    """Reads the usage of the answer, if it is needed."""
    span: RequestSpan | None = None

    async def recorded(self, spans: RequestSpans) -> WholeAnswer:
        """Do what `forward` does within a span."""
        path = self.request.path
        _, attributes = span_name(path, self.asked.model)
        attributes |= {"http.request.method": self.request.method, "url.path": path}
        ago = time.monotonic() - self.arrived
        with spans.begin(f"POST {path}", "server", self.headers, attributes, seconds_ago=ago) as self.span:
            answer = await self.forward()
            failed = str(answer.status) if answer.status >= 500 else None
            self.span.end({"http.response.status_code": answer.status}, error=failed)
            return answer

    async def forward(self) -> WholeAnswer:
        """Return the answer, sent or about to be sent. No selection is held by then, even after an error."""
        chosen = self.attempts.first(time.monotonic(), random.random())  # noqa: S311  # no secret
        self.state.metrics.choosing.observe(time.monotonic() - self.arrived)
        try:
            while chosen is not None:
                if chosen.mode != "mixed":
                    self.state.pairing.saw(chosen.mode)
                try:
                    if self.span is None:
                        answer = await self._ask(chosen, self.headers)
                    else:
                        answer = await self._attempt(chosen, self.span)
                finally:
                    chosen.release()
                if answer is not None:
                    return answer
                chosen = self.attempts.next(time.monotonic(), random.random())  # noqa: S311  # no secret
            self._not_processed()
        except (asyncio.CancelledError, ConnectionError):
            self.state.metrics.counts.disconnects += 1
            raise
        finally:
            took = None if self.meter is None else self.meter.tokens(self.asked.length)
            if took is not None:  # an answer that was not read completely is charged in full
                self.record.count(*took)
                self.record.settle()
        result = self.attempts.result
        return error_answer(refusal(result), self.request.path) if isinstance(result, NoWorker) else result

    def _not_processed(self) -> None:
        if self.meter is not None:
            self.meter.whole(b"")

    async def _attempt(self, selection: Selection, parent: RequestSpan) -> WholeAnswer | None:
        name, attributes = span_name(self.request.path, self.asked.model)
        url = urlsplit(selection.decode.url)
        where = {"server.address": url.hostname, "server.port": url.port, "fdcore.attempt": selection.attempt}
        with parent.child(name, "client", {**attributes, **where}) as span:
            headers = self.headers.copy()
            headers.update(span.headers)
            try:
                return await self._ask(selection, headers)
            finally:
                verdict = selection.verdicts.get(selection.decode)
                if verdict in _ENDS:
                    span.end(error=_ENDS[verdict])

    async def _ask(self, selection: Selection, headers: Headers) -> WholeAnswer | None:
        """Return the answer of the selected worker; None if another one is to be tried."""
        worker = selection.decode
        if selection.kv_port is not None:
            headers = ticket_headers(self.state, selection, headers, request_id=self.record.request_id)
        response: WorkerAnswer | None = None
        try:
            try:
                response = await self.state.client.request(
                    self.request.method,
                    worker.url,
                    self.request.target,
                    headers,
                    self.body,
                    forwards=True,
                )
                if DRAINING_HEADER in response.headers:
                    self.state.router.leaving(worker)
                if selection.mode == "pd":
                    outcome = outcome_of(response.headers)
                    self.state.metrics.counts.transfers[outcome] += 1
                    self.attempts.prefilled(outcome, time.monotonic())
                if response.status >= 400 and is_refusal(response.status):
                    refused = await self._refused(response)
                    self._not_processed()
                    return refused
                done = self.request.path in _ENDS_WITH_DONE
                answer = relaying.UpstreamAnswer(response, ends_with_done=done)
                first = await answer.begin()
            except (UPSTREAM_ERRORS, relaying.WorkerLost) as error:
                if is_resource_exhaustion(error):
                    raise unavailable("the router has no free connection", "no_connections", retry_after=1) from error
                self.attempts.lost(time.monotonic(), severe=isinstance(error, WorkerUnreachable))
                self.state.metrics.counts.attempts_lost += 1
                return None
            self.state.metrics.first_byte.observe(time.monotonic() - self.arrived)
            kept = self._to_client(response)
            if answer.whole:
                if self.meter is not None:
                    self.meter.whole(first)
                self.attempts.ended(response.status, time.monotonic())
                return WholeAnswer(response.status, first, kept)
            self.attempts.began()
            self.body = b""  # no other worker needs it
            self.share.release()
            response.passes = True
            return await self._stream(response, answer, first=first, headers=kept)
        finally:
            if response is not None and not response.ended:
                response.close()

    def _to_client(self, response: WorkerAnswer) -> Headers:
        """Return the headers of the answer; if the router has keys, they state its limits instead of the worker's."""
        headers = forwarded(response.headers, ANSWER_ONLY)
        if self.state.access.has_keys:
            for name in [each for each in headers if each.lower().startswith("x-ratelimit-")]:
                del headers[name]
            headers.update(limit_headers(self.record.account, time.monotonic()))
        return headers

    async def _refused(self, response: WorkerAnswer) -> WholeAnswer | None:
        """Return an error response that every worker would give; None if another worker may succeed."""
        body = await response.read_up_to(_ELSEWHERE_BYTES)
        refused = WholeAnswer(response.status, body, self._to_client(response))
        if response.status in (429, 503):
            refused.headers.setdefault("Retry-After", "1")
        no_model = self.request.path.startswith(OLLAMA_PATH) or any(name in body for name in _NO_MODEL)
        retries = self.attempts.refused(response.status, refused, time.monotonic(), no_model=no_model)
        return None if retries else refused

    async def _stream(
        self, response: WorkerAnswer, answer: relaying.UpstreamAnswer, first: bytes, headers: Headers
    ) -> WholeAnswer:
        """Relay the answer; if it is cut off, end it with an error event or by closing the connection."""
        request, relayed = self.request, WholeAnswer(response.status)
        if self.state.drain.leaving:
            request.keep_alive = False
        headers.update(self.added)
        request.begin(
            response.status, headers, None if answer.is_stream else length_of(response.headers.get("Content-Length"))
        )
        meter, client, cut = self.meter if answer.is_stream else None, request.connection, answer.cut

        def relay(part: bytes) -> bool:
            if client.full is not None or client.transport.is_closing():
                return False
            piece = cut(part)
            request.put(piece if meter is None else meter.piece(piece))
            return True

        response.direct, piece = relay, first
        try:
            while True:
                last = answer.complete
                await request.write(piece if meter is None else meter.piece(piece), last=last)
                if last:
                    break
                piece = await answer.more()
        except relaying.WorkerLost:
            self.attempts.lost(time.monotonic())
            self.state.metrics.counts.streams_broken += 1
            if not answer.is_stream:
                request.abort()
                return relayed
            await request.write(b"" if answer.error_forwarded else error_event(lost(), request.path), last=True)
        else:
            self.attempts.ended(response.status, time.monotonic())
        return relayed
