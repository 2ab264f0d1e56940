"""A scripted in-memory engine, a byte tokenizer, and a live server around them."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tokenizers
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from fd_core.config import EngineConfig, ServerConfig
from fd_core.engine.clients.client import EngineClient, SingleEngineClient
from fd_core.engine.process.messages import (
    Abort,
    ClientMessage,
    Control,
    Controlled,
    EngineInfo,
    EngineStats,
    QueryActivities,
    StepEvents,
    Submit,
)
from fd_core.http.connections.listening import bind_socket
from fd_core.http.spans import RequestSpans
from fd_core.kv.blocks import BlockStats
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.scheduling.contract import RequestActivity, SchedulerStats
from fd_core.scheduling.running.drafts import DraftStats
from fd_core.scheduling.running.running_batch import SchedulerCounters
from fd_core.scheduling.running.slots import SlotStats
from fd_core.server.serve import serve_http
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.parsing.answer import Parsers
from fd_core.text.tokenizer import Decoding, Tokenizer, byte_level
from fd_core.types import Delta, FinishReason, Phase, PrefillOutcome, RequestSpec, TokenLogprobs
from tests.text.small_tokenizers import byte_characters

EOS = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ speaker or 'assistant' }}: {% endif %}"
)

T = TypeVar("T")


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 is the control token that ends a text. The vocabulary of the null backend."""
    vocabulary = {character: index for index, character in enumerate(byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    assert backend.token_to_id("<|end|>") == EOS
    return Tokenizer(backend=backend, decoding=Decoding(byte_level), eos_id=EOS)


def chat_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE)


def engine_info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "model": "fake",
        "architecture": "none",
        "num_parameters": 0,
        "backend": "fake",
        "backend_reason": "a test",
        "device": "none",
        "dtype": "none",
        "kv_dtype": "none",
        "vocab_size": 257,
        "eos_token_ids": (EOS,),
        "max_model_len": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_kv_blocks": 40,
        "kv_cache_bytes": 0,
        "pipeline_depth": 1,
        "state_size": 4,
    }
    return EngineInfo(**(values | changes))


class FakeClient(SingleEngineClient):
    """Answers every request with the bytes of `reply`, then EOS, `per_step` tokens a step."""

    def __init__(self, reply: str | bytes = "Hello, world!", *, step_seconds: float = 0.0, **info: Any) -> None:
        super().__init__(EngineConfig(model="fake"))
        self.reply: Callable[[RequestSpec], bytes] = lambda _: reply.encode() if isinstance(reply, str) else reply
        self.step_seconds = step_seconds
        self.per_step = 1
        self.held = False
        """While true, nothing is generated."""
        self.pause_after: int | None = None
        """Number of tokens after which a request stalls."""
        self.fail_after: int | None = None
        """Number of tokens after which a request fails with an error."""
        self.cached_tokens = 0
        self.phases: tuple[float, ...] | None = None
        """Durations by phase, reported in the last delta of each request."""
        self.prefill: PrefillOutcome | None = None
        """Outcome reported for prompts computed by a prefill worker."""
        self.activity: tuple[str, Phase] | None = ("running", Phase.COMPUTING)
        """State and phase reported for every request; None reports nothing."""
        self.reports = 0
        """Reports of all activities that were queried."""
        self.specs: list[RequestSpec] = []
        self.aborts: list[str] = []
        self.live: dict[str, tuple[RequestSpec, int]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._engine_ready(engine_info(**info))

    def die(self) -> None:
        self.live.clear()
        self._fail_all("the engine's process ended")

    async def close(self, drain_seconds: float = 0.0) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._fail_all("the engine was closed")

    def _send(self, message: ClientMessage) -> None:
        match message:
            case Submit(spec):
                self.specs.append(spec)
                self.live[spec.request_id] = (spec, 0)
                if self._ticker is None or self._ticker.done():
                    self._ticker = asyncio.get_running_loop().create_task(self._tick())
            case Abort(request_ids):
                self.aborts += request_ids
                asyncio.get_running_loop().call_soon(self._abort, request_ids)
            case QueryActivities() if self.activity is not None:
                self.reports += 1
                found = {name: RequestActivity(*self.activity) for name in self.live}
                asyncio.get_running_loop().call_soon(self._reported, found)
            case Control(ticket):  # nothing to change
                asyncio.get_running_loop().call_soon(self._controlled, Controlled(ticket, self.info))

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        ended = [each for each in request_ids if self.live.pop(each, None) is not None]
        self._dispatch(StepEvents([Delta(each, (), FinishReason.ABORT) for each in ended], self._statistics()))

    async def _tick(self) -> None:
        while self.live:
            await asyncio.sleep(0.001 if self.held else self.step_seconds)
            if not self.held:
                going_on = [entry for entry in self.live.values() if entry[1] != self.pause_after]
                deltas = [self._step(*entry) for entry in going_on]
                self._dispatch(StepEvents(deltas, self._statistics()))

    def _step(self, spec: RequestSpec, done: int) -> Delta:
        params = spec.params
        script = [*self.reply(spec), EOS][: params.max_tokens]
        ids = tuple(script[done : done + self.per_step])
        reason = None
        for index, token in enumerate(ids):
            if token in params.stop_token_ids or (token in spec.eos_token_ids and not params.ignore_eos):
                ids, reason = ids[: index + 1], FinishReason.STOP
                break
        if reason is None and done + len(ids) >= len(script):
            reason = FinishReason.LENGTH
        error = None
        if self.fail_after is not None and done + len(ids) > self.fail_after:
            ids, reason, error = (), FinishReason.ERROR, "a row failed"
        if reason is None:
            self.live[spec.request_id] = (spec, done + len(ids))
        else:
            del self.live[spec.request_id]
        scores = None
        if params.logprobs is not None:
            count = params.logprobs
            scores = tuple(
                TokenLogprobs(-0.5, tuple(range(65, 65 + count)), (float("-inf"),) * count) for _ in range(len(ids))
            )
        cached, prefill = (self.cached_tokens, self.prefill) if done == 0 else (None, None)
        pooled = None if spec.pooling is None else struct.pack("<4f", *spec.pooling.token_ids or (1, 2, 3, 4))
        phases = None if reason is None else self.phases
        return Delta(spec.request_id, ids, reason, scores, cached, error, prefill, pooled=pooled, phases=phases)

    def _statistics(self) -> EngineStats:
        return EngineStats(
            scheduler=SchedulerStats(
                slots=SlotStats(running=len(self.live)),
                counters=SchedulerCounters(preemptions=3),
                blocks=BlockStats(total=40, used=len(self.live)),
                drafts=DraftStats(proposed_per_position=(9, 7), accepted_per_position=(6, 2)),
            )
        )


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of all events of a stream; `[DONE]` stays text."""
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


class LiveServer:
    """A server on a free port of the loopback, in a thread with its own loop."""

    def __init__(
        self,
        client: Callable[[], Coroutine[Any, Any, EngineClient]],
        config: ServerConfig,
        ticket_key: bytes | None = None,
        parsers: Parsers | None = None,
        tokenizer: Tokenizer | None = None,
        spans: RequestSpans | None = None,
        images: ImageProcessor | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self._spans = spans
        self._images = images
        self._template = template or chat_template()
        self._tokenizer = tokenizer or byte_tokenizer()
        self._parsers = parsers
        self._make_client = client
        self._config = config
        self._ticket_key = ticket_key
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self.error: BaseException | None = None

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            self.client: Any = await self._make_client()
            sock = bind_socket(self._config.host, 0)
            self.port: int = sock.getsockname()[1]
            try:
                await serve_http(
                    self._config,
                    self.client,
                    self._tokenizer,
                    self._template,
                    ticket_key=self._ticket_key,
                    parsers=self._parsers,
                    spans=self._spans,
                    images=self._images,
                    sock=sock,
                    on_ready=lambda _: self._ready.set(),
                    stop=self._stop,
                )
            finally:
                await self.client.close()
        except BaseException as error:
            self.error = error
            self._ready.set()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the server's loop."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request and read the whole answer. Keywords are headers, `_` for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if data is not None:
            named.setdefault("content-type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, data, named)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.request("POST", path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, None, **headers)


def samples(server: LiveServer) -> dict[str, float]:
    """Return every metric by its name and label values."""
    text = server.get("/metrics").body.decode()
    families = text_string_to_metric_families(text)
    return {
        sample.name + "".join(f"[{value}]" for _, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


@contextmanager
def live(
    make: Callable[[], EngineClient] | Callable[[], Coroutine[Any, Any, EngineClient]] = FakeClient,
    ticket_key: bytes | None = None,
    parsers: Parsers | None = None,
    tokenizer: Tokenizer | None = None,
    spans: RequestSpans | None = None,
    images: ImageProcessor | None = None,
    template: ChatTemplate | None = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """Run a server over the client that `make` returns or awaits, by default with byte tokens, until the block ends."""

    async def client() -> EngineClient:
        made = make()
        return await made if isinstance(made, Coroutine) else made

    config = ServerConfig(**({"drain_seconds": 2.0, "batch_api": False} | settings))
    server = LiveServer(client, config, ticket_key, parsers, tokenizer, spans, images, template)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.join()


def key_file(folder: Path, *keys: dict[str, Any]) -> str:
    """Write a file whose keys equal their names."""
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": [{"key": each["name"]} | each for each in keys]}))
    path.chmod(0o600)
    return str(path)
