"""Unknown fields fill neither the log nor the memory."""

from __future__ import annotations

import logging

import pytest

from fd_core.server.preprocess import body as body_reading
from tests.server.fakes import LiveServer


def test_unknown_fields_are_logged_in_one_rate_limited_line(
    server: LiveServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(body_reading.time, "monotonic", lambda: now)
    with caplog.at_level(logging.WARNING, logger="fd_core.server.preprocess.body"):
        for round_number in range(100):
            fields = {f"field_{round_number}_{index}": 1 for index in range(900)}
            answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **fields})
            assert answer.status == 200
            assert len(answer.headers["x-ignored-fields"]) < 1000
        assert len(caplog.records) == 1
        assert len(caplog.records[0].getMessage()) < 1000
        now += 11.0
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "another_one": 1})
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "another_one": 1})
    assert [record.getMessage().count("another_one") for record in caplog.records] == [0, 1]


def test_too_many_unknown_fields_are_rejected(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", **{f"field_{index}": 1 for index in range(1500)}})
    assert (answer.status, answer.error["code"]) == (400, "invalid_body")
    assert "1,000 unknown fields" in answer.error["message"]
