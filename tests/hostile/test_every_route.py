"""Hostile paths, queries, headers and bodies for every route, which are derived from the application."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import pytest

from fd_core.config import ServerConfig
from fd_core.server.app import create_app
from tests.hostile.endpoints import Hostile
from tests.hostile.fuzzing import Fuzzed, fuzzed
from tests.hostile.limits import at_length
from tests.server.fakes import FakeClient, byte_tokenizer, chat_template

ROUNDS = at_length(300, 20_000)

SEGMENTS = [
    *("%00", "%ff", "%0a", "%2e%2e", "%2F", "..", "%", "%zz", "a;b", "a%3fb", "%ed%a0%80", "%F0%9F%98%80", "\x7f"),
    *("a" * 300, "a" * 10_000),
]
QUERIES = [
    *("limit=" + "9" * 5000, "limit=-1", "limit=", "limit=%00", "limit=%D9%A1", "limit=1e3", "limit=%C2%B2", "&&&="),
    *("after=%00&order=x", "after=" + "a" * 9000, "after=%ff", "purpose=%ff", "a" * 20_000, "limit=1&limit=2", "%"),
]
BODIES = [
    *(b"", b"null", b"[]", b'""', b"{}", b"0", b"9" * 5000, b'{"model":' + b"9" * 5000 + b"}", b"[" * 2000),
    *(b'{"a":' * 2000, b'"\\ud800"', b"NaN", b'{"model":-Infinity}', b"\xef\xbb\xbf{}", b"\x00", b"\xff\xfe"),
    *('{"model":"a"}'.encode("utf-16"), "{}".encode("utf-32"), b'{"model":"fake","model":null}', b'{"":{"":null}}'),
]
VALUES = [
    *(b"null", b"9" * 5000, b"-1", b"0", b"1.5", b"1e400", b"-0.0", b"true", b'""', b"[]", b"{}", b"[null]"),
    *(b'{"a":null}', b'"\\u0000"', b'"\\ud800"', b"99999999999999999999999", b"[[[[[]]]]]", b'"' + b"a" * 5000 + b'"'),
]
BASES = [
    {"model": "fake", "prompt": "a", "max_tokens": 2, "stop": ["a"], "logit_bias": {}, "n": 1, "seed": 1, "user": "a"},
    {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tools": [], "metadata": {}},
    {"model": "fake", "input": "a", "previous_response_id": None, "store": False, "encoding_format": "float"},
    {"input_file_id": "file-a", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {}},
    {"model": "fake", "query": "a", "documents": ["b"], "tokens": [1], "request_ids": ["a"], "lora_name": "a"},
]
TYPES = [
    *(b"application/json", b"application/json; charset=utf-7", b"application/json; charset=none", b"text/plain", b""),
    *(b"application/json; charset=\xff", b"\xff\xfe", b"multipart/form-data; boundary=b", b"a/b" * 9000),
]
BOUNDARIES = [
    *(b"", b"; boundary=", b'; boundary=""', b"; boundary=" + b"b" * 250, b"; boundary=\xff", b"; boundary*=utf-7''b"),
    *(b"; boundary*=none''b", b"; boundary*0*=hex''b; boundary*1*=%ff", b"; boundary*" + b"9" * 5000 + b"=b"),
    *(b'; boundary="b\\"c"', b"; boundary=b" * 900, b"; boundary==?none?q?b?=", b"; charset=utf-7; boundary=b"),
]
NAMES = [
    *(b"filename*=utf-7''a", b"filename*=none''a", b"filename*=utf-8''%ff%00", b'filename="\xff\x01"', b'filename=""'),
    *(b'filename="../../a"', b'filename="=?none?q?a?="', b"filename*=hex''a", b"filename*=idna''a..b", b"filename"),
    *(b"filename*0*=none''a; filename*1*=%ff", b"filename*" + b"9" * 5000 + b"=a", b"filename*=a%01b''a"),
    *(b"filename*=utf-16-le''%00%d8", b'filename="' + b"a" * 7900 + b'"', b'filename="a\r\n b"', b""),
]
CUTS = [b"", b"\xff", b"\0", b"\r\n", b"--b", b"''", b"*", b"%ff", b";", b'"', b"=?utf-7?q?+/v8?="]


def routes() -> list[tuple[str, str]]:
    """Return method and path of every route of an application with all features enabled."""
    app = create_app(ServerConfig(batch_api=True), FakeClient(), byte_tokenizer(), chat_template())
    found, pending = set(), list(app.routes)
    while pending:
        route = pending.pop()
        included = getattr(route, "original_router", None)
        pending += included.routes if included is not None else []
        found |= {(method, route.path) for method in getattr(route, "methods", None) or () if method != "HEAD"}
    return sorted(found)


@pytest.fixture(scope="module", params=["everything", "router"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    with fuzzed(request.param, tmp_path_factory.mktemp("routes")) as found:
        yield found


def ask(target: Fuzzed, method: str, path: str, body: bytes = b"", kind: bytes = TYPES[0], more: bytes = b"") -> int:
    """Send a request; check that the response is no failure and that errors have OpenAI's or Anthropic's format."""
    head = b"%b %b HTTP/1.1\r\nHost: localhost\r\n" % (method.encode(), path.encode())
    head += b"Content-Type: %b\r\n%bContent-Length: %d\r\n\r\n" % (kind, more, len(body))
    with Hostile(int(target.url.rpartition(":")[2])) as connection:
        status, _, answer = connection.send(head + body).answer()
    request = (method, path[:100], kind[:100], body[:200])
    assert status < 500 or status == 503, request
    assert status < 400 or "error" in json.loads(answer), request
    target.count(status)
    return status


def form(disposition: bytes, purpose: bytes = b"batch") -> bytes:
    """Return an upload form; `disposition` names the file."""
    fields = ((b'name="purpose"', purpose), (b'name="file"; ' + disposition, b"{}\n"))
    parts = [b"--b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % field for field in fields]
    return b"".join(parts) + b"--b--\r\n"


@pytest.mark.parametrize(("method", "path"), routes())
def test_paths_and_queries_never_fail(target: Fuzzed, method: str, path: str) -> None:
    body = b"{}" if method == "POST" else b""
    if "{" in path:
        for segment in SEGMENTS:
            ask(target, method, re.sub(r"\{[^}]*\}", lambda _, given=segment: given, path), body)
    else:
        for query in QUERIES:
            ask(target, method, f"{path}?{query}", body)


@pytest.mark.parametrize("path", [path for method, path in routes() if method == "POST"])
def test_bodies_never_fail(target: Fuzzed, path: str) -> None:
    path = path.replace("{batch_id}", "a")
    for body in BODIES:
        ask(target, "POST", path, body)
    for kind in TYPES:
        ask(target, "POST", path, b"{}", kind)


def test_values_of_any_kind_never_fail(target: Fuzzed) -> None:
    rng, paths = random.Random(1), [path for method, path in routes() if method == "POST"]
    for _ in range(ROUNDS):
        base = rng.choice(BASES)
        fields = {name: json.dumps(value).encode() for name, value in base.items()}
        for name in rng.sample([*base, *rng.choice(BASES)], rng.choice((1, 1, 2))):
            fields[name] = rng.choice(VALUES)
        body = b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items())
        ask(target, "POST", rng.choice(paths).replace("{batch_id}", "a"), body)


@pytest.mark.parametrize("target", ["everything"], indirect=True)
def test_uploads_never_fail(target: Fuzzed) -> None:
    for boundary in BOUNDARIES:
        ask(target, "POST", "/v1/files", form(b'filename="a"'), b"multipart/form-data" + boundary)
    for name in NAMES:
        ask(target, "POST", "/v1/files", form(name), b"multipart/form-data; boundary=b")
    rng = random.Random(1)
    for _ in range(ROUNDS):
        body = bytearray(form(rng.choice(NAMES), rng.choice((b"batch", b"\xff", b"", b"\0", b"a" * 5000))))
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(len(body))
            body[at : at + rng.randrange(3)] = rng.choice(CUTS)
        ask(target, "POST", "/v1/files", bytes(body), b"multipart/form-data; boundary=b")
    assert ask(target, "GET", "/v1/files") == 200


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"gzip, identity", b"\xff", b"x" * 9000])
def test_compressed_body_is_rejected_by_content_encoding(target: Fuzzed, coding: bytes) -> None:
    for path in ("/v1/completions", "/v1/files") if target.kind == "everything" else ("/v1/completions",):
        kind = TYPES[0] if path != "/v1/files" else b"multipart/form-data; boundary=b"
        assert ask(target, "POST", path, b"\x1f\x8b", kind, b"Content-Encoding: %b\r\n" % coding) == 415
    body = b'{"model":"fake","prompt":"a"}'
    assert ask(target, "POST", "/v1/completions", body, more=b"Content-Encoding: Identity\r\n") == 200
