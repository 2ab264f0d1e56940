"""OpenTelemetry spans of requests, named by its conventions for generative AI; no prompt and no text is in them.

OpenTelemetry is an extra and is imported only by `open_spans`. A separate thread exports spans, so that their creators
never wait for a collector; spans that a collector does not accept are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

import fd_core
from fd_core.errors import ConfigError

log = logging.getLogger(__name__)

TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""Headers of W3C Trace Context."""
_CLOSE_SECONDS: Final = 3.0
"""Timeout for exporting the last spans at shutdown."""
_FLAG: Final = "--otlp-traces-endpoint"
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}

Kind = Literal["server", "client", "internal"]


def span_name(path: str, model: str | None) -> tuple[str, dict[str, str]]:
    """Return the name of a span for a request to `path`, and the matching attributes."""
    operation = _OPERATIONS.get(path, "chat")
    named = {} if model is None else {"gen_ai.request.model": model}
    return f"{operation} {model}" if model else operation, {"gen_ai.operation.name": operation, **named}


def open_spans(endpoint: str, service: str) -> RequestSpans:
    """Return the exporter of spans to `endpoint`, configured by `OTEL_*` variables. Raises `ConfigError` on failure."""
    if not endpoint.startswith(("http://", "https://")):
        hint = "use the full URL, for example http://localhost:4318/v1/traces; gRPC is not supported"
        raise ConfigError(f"{endpoint!r} is not the URL of an OTLP/HTTP collector", field=_FLAG, hint=hint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return RequestSpans(OTLPSpanExporter(endpoint=endpoint), service)
    except ImportError as error:
        message = f"tracing requires OpenTelemetry, which is not installed: {error}"
        raise ConfigError(message, field=_FLAG, hint="pip install 'fd-core[otel]'") from error


class RequestSpans:
    """Makes the spans of one process."""

    def __init__(self, exporter: Any, service: str) -> None:
        """`exporter` is a `SpanExporter`; it is used by a thread that starts here. Raises `ImportError`."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The exporter logs each failed try; `_Guarded` logs the failure once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        named = Resource.create().attributes.get(SERVICE_NAME, "unknown_service")
        name = service if str(named).startswith("unknown_service") else named
        self.provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(_Guarded(exporter)))
        self._tracer = self.provider.get_tracer("fd_core", fd_core.__version__)
        self.propagator = TraceContextTextMapPropagator()
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}
        self.api = trace

    def begin(
        self,
        name: str,
        kind: Kind,
        carried: Mapping[str, str],
        attributes: Mapping[str, Any],
        *,
        seconds_ago: float = 0.0,
        parent: RequestSpan | None = None,
    ) -> RequestSpan:
        """Begin a span below `parent`, or below the span in the headers `carried`."""
        context = self.propagator.extract(carried) if parent is None else parent.context
        started = time.time_ns() - round(seconds_ago * 1e9)
        span = self._tracer.start_span(name, context, self._kinds[kind], dict(attributes), start_time=started)
        return RequestSpan(self, span, self.api.set_span_in_context(span))

    def close(self) -> None:
        """Export pending spans, for a few seconds at most."""
        closing = threading.Thread(target=self.provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class RequestSpan(AbstractContextManager["RequestSpan"]):
    """One span, which ends once; later events are dropped."""

    def __init__(self, spans: RequestSpans, span: Any, context: Any) -> None:
        self._spans = spans
        self._span = span
        self._ended = False
        self.context = context

    @property
    def headers(self) -> dict[str, str]:
        """Headers that propagate the span to another process."""
        headers: dict[str, str] = {}
        self._spans.propagator.inject(headers, self.context)
        return headers

    def child(self, name: str, kind: Kind, attributes: Mapping[str, Any]) -> RequestSpan:
        """Begin a span below this one."""
        return self._spans.begin(name, kind, {}, attributes, parent=self)

    def end(self, attributes: Mapping[str, Any] | None = None, *, error: str | None = None) -> None:
        """End the span; `error` names a kind of failure."""
        if self._ended:
            return
        self._ended = True
        self._span.set_attributes(dict(attributes or {}))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(self._spans.api.StatusCode.ERROR)
        self._span.end()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(error=None if kind is None else kind.__name__)


class _Guarded:
    """An exporter that logs the first of several failures in a row, and the recovery."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._fails = False

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result, reason = self._exporter.export(spans), "export rejected"
        except Exception as error:  # noqa: BLE001  # third-party code: the spans are lost after any error
            result, reason = SpanExportResult.FAILURE, type(error).__name__
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning("spans cannot be exported (%s); they are dropped until the collector recovers", reason)
        elif self._fails and not fails:
            log.info("spans are exported again")
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))
