"""No request blocks the event loop, and with it all streams and /health, for more than 50 ms."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from fd_core.http.connections.listening import settle
from fd_core.router.gateway.requests.route_requests import RouteRequestReader
from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.prompt_reader import ModelText, find_text
from tests.hostile.bodies import BODIES, CHAT, COMPLETIONS, MB, MESSAGE, body_of
from tests.hostile.event_loop import LONGEST_STALL, Beats, least, post, stall
from tests.server.fakes import FakeClient, LiveServer, live

pytestmark = pytest.mark.timing

TEXT = find_text("bytes", offline=True)


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    """Freeze the garbage collector as `fdcore serve` does, so that it skips what the tests have loaded."""
    settle()
    yield
    gc.unfreeze()


def some(step: int, *values: object, first: int = 0) -> list[object]:
    """Return the cases of all bodies with these values; the default run has one of so many, `nox -s soak` the others.

    Every body is read by default, by a server or by a router.
    """
    chosen = [*BODIES][first::step]
    return [pytest.param(*values, name, marks=() if name in chosen else pytest.mark.soak) for name in BODIES]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Server with a short context and server with a long one; both support tools."""
    with live(lambda: FakeClient(max_model_len=request.param), parsers=Parsers(HermesTools, None)) as running:
        yield running


@pytest.mark.parametrize(("server", "name"), [*some(2, 262_144), *some(5, 400)], indirect=["server"])
def test_large_body_does_not_block_the_loop(server: LiveServer, name: str) -> None:
    path, body = BODIES[name][0], body_of(name)
    seen = set()
    pause = stall(server, lambda: seen.add(post(server, path, body)[0]))
    assert seen <= {200, 400}
    assert pause < LONGEST_STALL


@pytest.mark.parametrize("server", [400], indirect=True)
def test_stall_is_detected(server: LiveServer) -> None:
    def hold() -> None:
        sum(range(20_000_000))

    assert stall(server, lambda: server.call(hold)) > LONGEST_STALL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_response_full_of_logprobs_does_not_block_the_loop(path: str, stream: bool) -> None:
    fields = b'"prompt":"x","logprobs":20'
    if path == CHAT:
        fields = MESSAGE[1:] + b'"x"}],"logprobs":true,"top_logprobs":20'
    body = b'{%b,"n":128,"max_tokens":200,"stream":%b}' % (fields, b"true" if stream else b"false")
    with live(lambda: FakeClient("x" * 200, max_num_seqs=128)) as running:
        answers: list[tuple[int, bytes]] = []
        pause = stall(running, lambda: answers.append(post(running, path, body)))
    assert {status for status, _ in answers} == {200}
    assert len(answers[0][1]) > 5 * MB
    assert pause < LONGEST_STALL


@pytest.mark.parametrize(
    ("text", "name"),
    [*some(2, TEXT, first=1), *some(5, None)],
    ids=lambda value: value if isinstance(value, str) else "by tokens" if value else "by bytes",
)
def test_reading_a_body_does_not_block_a_router(name: str, text: ModelText | None) -> None:
    body = body_of(name)

    async def pause() -> float:
        beats = Beats(asyncio.get_running_loop())
        beats.begin()
        request = await reader.read(body)
        await reader.model(body)
        await asyncio.sleep(0.005)
        beats.running = False
        assert 1 <= len(request.tokens) <= 131_072
        return beats.longest

    reader = RouteRequestReader(text)
    try:
        assert least(lambda: asyncio.run(pause())) < LONGEST_STALL
    finally:
        reader.close()
