"""Files of API keys."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest

from fd_core.errors import ConfigError
from fd_core.http.access.keys import ApiKey, KeyLimits, read_key_file, warn_if_others_read

DIGEST = hashlib.sha256(b"sk-bob").hexdigest()
TOML = f"""
# the keys of this server
[[keys]]
name = "alice"
key = "sk-alice"
admin = true

[[keys]]
name = "bob"
sha256 = "{DIGEST.upper()}"
requests_per_minute = 60
tokens_per_minute = 100_000
parallel_requests = 8
"""
AS_JSON = {
    "keys": [
        {"name": "alice", "key": "sk-alice", "admin": True},
        {
            "name": "bob",
            "sha256": DIGEST,
            "requests_per_minute": 60,
            "tokens_per_minute": 100_000,
            "parallel_requests": 8,
        },
    ]
}


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rejection(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    assert caught.value.field == "--api-key-file" and caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("k.toml", TOML), ("k.json", json.dumps(AS_JSON)), ("K.TOML", TOML)])
def test_toml_and_json_are_equivalent(tmp_path: Path, name: str, text: str) -> None:
    alice, bob = read_key_file(written(tmp_path, name, text))
    assert (alice.name, alice.admin, alice.digest) == ("alice", True, ApiKey.of("sk-alice").digest)
    assert (bob.name, bob.admin, bob.digest) == ("bob", False, ApiKey.of("sk-bob").digest)
    assert bob.limits == KeyLimits(requests_per_minute=60, tokens_per_minute=100_000, parallel_requests=8)


def test_plain_file_has_one_key_per_line_without_names(tmp_path: Path) -> None:
    assert read_key_file(written(tmp_path, "keys", "one\n\n  two \none")) == (ApiKey.of("one"), ApiKey.of("two"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('nmae = "carl"', "line 7, nmae: unknown field (did you mean name?)"),
        ('"sk-secret" = "carl"', "line 4: unknown field (expected one of"),
        ("requests_per_minute = 0", "line 7, requests_per_minute: expected an integer"),
        ("tokens_per_minute = 1.5", "line 7, tokens_per_minute: expected an integer"),
        ("parallel_requests = true", "line 7, parallel_requests: expected an integer"),
        ("admin = 1", "line 7, admin: expected true or false"),
        ('sha256 = "00"', "line 6, key: specify either key or sha256"),
    ],
)
def test_error_names_its_line_and_field(tmp_path: Path, line: str, expected: str) -> None:
    text = f"""[[keys]]
name = "bob"
sha256 = "{DIGEST}"
[[keys]]  # line 4
name = "al"
key = "sk-al"
{line}
"""
    message = rejection(written(tmp_path, "k.toml", text))
    assert expected in message and "sk-" not in message, message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "alice"}, "name: line 2, name has the same name"),
        ({"key": "sk-alice"}, "key: "),
        ({"name": "two words"}, "name: expected 1 to 64"),
        ({"name": "x" * 65}, "name: expected 1 to 64"),
        ({"name": 3}, "name: expected 1 to 64"),
        ({"name": "a\nb"}, "name: expected 1 to 64"),
        ({"key": ""}, "key: expected 1 to"),
        ({"key": "sk carl"}, "key: expected 1 to"),
        ({"key": "schlüssel"}, "key: expected 1 to"),
        ({"key": "x" * 4097}, "key: expected 1 to"),
        ({"key": None}, "key: expected 1 to"),
        ({"sha256": "0" * 64}, "key: specify either key or sha256"),
        ({"requests_per_minute": "60"}, "requests_per_minute: expected an integer"),
        ({"requests_per_minute": 10**13}, "requests_per_minute: expected an integer"),
        ({"requests_per_minute": None}, "requests_per_minute: expected an integer"),
    ],
)
def test_error_in_json_names_its_line(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    entries = [*AS_JSON["keys"], {"name": "carl", "key": "sk-carl"} | changes]
    text = '{"keys": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]}\n"
    message = rejection(written(tmp_path, "k.json", text))
    assert "line 4, " in message and expected.replace("line 2, name", "line 2") in message, message
    assert "sk-" not in message


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("k.toml", "", "must hold a list `keys` with at least one key"),
        ("k.toml", "keys = []", "must hold a list `keys` with at least one key"),
        ("k.toml", 'keys = "sk-one"', "must hold a list"),
        ("k.toml", TOML + '[other]\nx = "y"', "and nothing else"),
        ("k.toml", "keys = ['sk-one']", "entry 1: expected a table"),
        ("k.toml", '[[keys]]\nname = "a\n', "is not valid TOML"),
        ("k.toml", '[[keys]]\nkey = "a"\nkey = "sk-one"\n', "(at line 3"),
        ("k.toml", b'[[keys]]\nname = "\xff"', "is not UTF-8 text"),
        ("k.json", "[]", "must hold a list"),
        ("k.json", '{"keys": [{"name": "a", "name": "b"}]}', "name is duplicated"),
        ("k.json", '{"keys": [{"sk-one": 1, "sk-one": 1}]}', "a field is duplicated"),
        ("k.json", '{"keys": [NaN]}', "entry 1: expected a table"),
        ("k.json", "[" * 100_000, "nested too deeply"),
        ("keys", "", "contains no key"),
        ("keys", TOML, "looks like TOML or JSON (rename it to .toml or .json"),
        ("keys", "one\none two\n", "line 2, key: expected 1 to"),
    ],
)
def test_invalid_file_is_rejected(tmp_path: Path, name: str, text: str | bytes, expected: str) -> None:
    message = rejection(written(tmp_path, name, text))
    assert expected in message and "sk-" not in message, message


def test_missing_or_unreadable_file_is_rejected(tmp_path: Path) -> None:
    assert "cannot read" in rejection(tmp_path / "none.toml")
    assert "is a directory" in rejection(tmp_path)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_world_readable_file_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    path = written(tmp_path, "k.toml", TOML)
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        warn_if_others_read(path)
    assert ("chmod 600" in caplog.text) == warned
