import asyncio
import contextlib
import os
import signal
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.chats.api_client import ApiClient, ServerAnswer
from fd_core.cli.chats.chat_backend import EngineChatBackend, SamplingOptions
from fd_core.cli.chats.loop_thread import LoopThread
from fd_core.cli.serving import startup
from fd_core.config import EngineConfig
from fd_core.engine.process import engine_process
from fd_core.errors import BadRequest, FdError, ModelError
from tests.server.fakes import FakeClient, byte_tokenizer, chat_template, live

runner = CliRunner()


def prompt_of(spec):
    return bytes(spec.prompt).decode()


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise, even if the tests were started with SIGINT ignored, as shells do for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def local(monkeypatch):
    """Replace local models by fakes; yield the started clients and whether each was closed."""
    clients = []

    def find_model(config, template, bars):
        return startup.LocalModel(EngineConfig(model="fake"), "nowhere", byte_tokenizer(), chat_template())

    @contextlib.asynccontextmanager
    async def running_engine(model, where, bars=None, *, prestarted=None):
        clients.append(FakeClient("Bonjour, ça va?"))
        yield clients[-1]
        await clients[-1].close()

    monkeypatch.setattr(startup, "find_model", find_model)
    monkeypatch.setattr(startup, "running_engine", running_engine)
    monkeypatch.setattr(engine_process, "prestarted_process", lambda *_, **__: contextlib.nullcontext())
    return clients


def test_complete_prints_the_continuation(local):
    result = runner.invoke(app, ["complete", "Salut"])
    assert (result.exit_code, result.stdout) == (0, "Bonjour, ça va?\n")
    assert prompt_of(local[0].specs[0]) == "Salut"
    assert not local[0].alive


def test_complete_reads_standard_input(local):
    runner.invoke(app, ["complete", "-"], input="from a pipe")
    assert prompt_of(local[0].specs[0]) == "from a pipe"


def test_sampling_flags_reach_the_request(local):
    flags = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.25", "--seed", "7"]
    assert runner.invoke(app, ["complete", "x", *flags]).stdout == "Bon\n"
    params = local[0].specs[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.5, 0.25, 7)


def test_chat_keeps_history_until_reset(local):
    lines = "first\nsecond\n/reset\nthird\n/quit\nnever sent\n"
    result = runner.invoke(app, ["chat", "--system", "Be brief."], input=lines)
    assert result.exit_code == 0
    first, second, third = map(prompt_of, local[0].specs)
    assert first == "system: Be brief.\nuser: first\nassistant: "
    assert second == f"{first}Bonjour, ça va?\nuser: second\nassistant: "
    assert third == "system: Be brief.\nuser: third\nassistant: "


def test_run_answers_one_prompt_as_ollama_does(local):
    result = runner.invoke(app, ["run", "smollm2", "Bonjour !"], input="not read\n")
    assert (result.exit_code, result.stdout) == (0, "Bonjour, ça va?\n")
    assert [prompt_of(spec) for spec in local[0].specs] == ["user: Bonjour !\nassistant: "]


def test_run_reads_a_prompt_from_standard_input(local):
    assert runner.invoke(app, ["run", "smollm2", "-"], input="Two\nlines").exit_code == 0
    assert [prompt_of(spec) for spec in local[0].specs] == ["user: Two\nlines\nassistant: "]


def test_chat_with_a_server():
    with live(lambda: FakeClient("From afar"), api_keys=("sesame",)) as server:
        result = runner.invoke(app, ["chat", "--url", server.url, "--api-key", "sesame"], input="hi\n")
        assert (result.exit_code, result.stdout) == (0, "From afar\n")
        refused = runner.invoke(app, ["chat", "--url", server.url], input="hi\n")
    assert refused.exit_code == 1
    assert "401" in refused.stderr


def test_chat_with_a_silent_server_times_out(monkeypatch):
    monkeypatch.setattr("fd_core.cli.chats.api_client._LIST_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = runner.invoke(app, ["chat", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}"], input="hi\n")
    assert result.exit_code == 1
    assert "cannot connect to the server: timeout (check that it is running)" in result.stderr


async def _endless(request):
    response = web.StreamResponse(status=500)
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"x" * 65536)
    return response


def test_endless_error_body_is_read_up_to_a_limit():
    async def ask():
        endless = web.Application()
        endless.router.add_route("*", "/{tail:.*}", _endless)
        async with TestServer(endless) as server, ApiClient(str(server.make_url(""))) as client:
            with pytest.raises(ServerAnswer, match="HTTP status 500: xxx"):
                await asyncio.wait_for(client.first_model(), 20)
            with pytest.raises(ServerAnswer, match="HTTP status 500: xxx"):
                await asyncio.wait_for(anext(client.stream("/v1/completions", {})), 20)

    asyncio.run(ask())


def test_complete_reports_server_errors():
    with live(lambda: FakeClient("From afar")) as server:
        url = ["--url", server.url]
        assert runner.invoke(app, ["complete", "x", *url]).stdout == "From afar\n"
        unknown = runner.invoke(app, ["complete", "x", *url, "--model", "other"])
        long = runner.invoke(app, ["complete", "x" * 1000, *url])
    assert unknown.exit_code == long.exit_code == 1
    assert "the model 'other' does not exist" in unknown.stderr
    assert "400" in long.stderr


def test_failed_row_is_reported(local):
    with LoopThread() as loop, loop.entered(startup.running_engine(None, "inproc")) as client:
        client.fail_after = 3
        backend = EngineChatBackend(client, byte_tokenizer(), None)
        pieces = []
        with pytest.raises(FdError, match="a row failed"):
            pieces.extend(loop.iterate(backend.complete("x", SamplingOptions())))
    assert "".join(pieces) == "Bon"


def test_prompt_beyond_the_context_is_rejected_with_the_limit(local):
    with LoopThread() as loop, loop.entered(startup.running_engine(None, "inproc")) as client:
        backend = EngineChatBackend(client, byte_tokenizer(), None)
        with pytest.raises(BadRequest, match="the prompt has 400 tokens, but the context length"):
            list(loop.iterate(backend.complete("x" * 400, SamplingOptions())))
        with pytest.raises(BadRequest, match="the prompt is empty"):
            list(loop.iterate(backend.complete("", SamplingOptions())))
        with pytest.raises(ModelError, match="has no chat template"):
            backend.chat([{"role": "user", "content": "x"}], SamplingOptions())


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(local, interruptible, monkeypatch):
    """Interrupt the first answer after its first chunk: the engine aborts it, and the next line is answered."""
    written = []

    def put(text):
        written.append(text)
        if text == "B" and "stopped" not in written:
            written.append("stopped")
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("fd_core.cli.chats.chat._put", put)
    original = FakeClient.__init__
    monkeypatch.setattr(FakeClient, "__init__", lambda self, reply: original(self, reply, step_seconds=0.05))
    result = runner.invoke(app, ["chat"], input="one\ntwo\n")
    assert result.exit_code == 0
    assert len(local[0].specs) == 2
    assert len(local[0].aborts) == 1
    assert "".join(written).endswith("Bonjour, ça va?\n")


def test_loop_thread_cancels_interrupted_work(interruptible):
    ended = []

    async def forever():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with LoopThread() as loop, pytest.raises(KeyboardInterrupt):
        loop.run(forever())
    assert ended == [True]
