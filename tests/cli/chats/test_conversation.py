"""Input of a chat: commands, multi-line messages, and the line history of earlier sessions."""

from __future__ import annotations

import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fd_core.cli.chats.chat import AnswerSpeed
from fd_core.cli.chats.conversation import ChatHistory, typed_messages
from fd_core.errors import ConfigError
from tests.server.fakes import FakeClient, live

UP = "\x1b[A"


class Terminal:
    """A chat process on a pseudo-terminal, and its output."""

    def __init__(self, cache: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fd_core.cli", "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "FD_CACHE": str(cache), "TERM": "xterm", "INPUTRC": os.devnull},
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str, until: str) -> str:
        """Type a text and return the output up to `until`, which must appear."""
        os.write(self._master, text.encode())
        deadline = time.monotonic() + 60
        while until not in self.shown and time.monotonic() < deadline:
            if select.select([self._master], [], [], 1)[0]:
                self.shown += os.read(self._master, 4096).decode(errors="replace")
        before, found, self.shown = self.shown.partition(until)
        assert found, before
        return before + found

    def leave(self) -> None:
        os.write(self._master, b"/quit\n")
        assert self.process.wait(30) == 0
        os.close(self._master)


def test_terminal_keeps_history_and_shows_token_rate(tmp_path: Path) -> None:
    clients: list[FakeClient] = []

    def client() -> FakeClient:
        clients.append(FakeClient("From afar"))
        return clients[-1]

    with live(client) as server:
        chat = Terminal(tmp_path, "--url", server.url)
        chat.type("", "> ")
        shown = chat.type("hello there\n", "first after ")
        assert "From afar" in shown
        assert re.search(r"\[10 tokens(, [\d,.]+ tokens/s)?, first after $", shown)
        chat.type("", "> ")
        chat.leave()
        again = Terminal(tmp_path, "--url", server.url)
        again.type("", "> ")
        again.type(f"{UP}{UP}", "hello there")
        again.type(" again\n", "From afar")
        again.type("", "> ")
        again.leave()
        prompts = [bytes(spec.prompt).decode() for spec in clients[0].specs]
    assert prompts == ["user: hello there\nassistant: ", "user: hello there again\nassistant: "]
    history = tmp_path / "chat_history"
    assert history.read_text().splitlines() == ["hello there", "/quit", "hello there again", "/quit"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_input_to_a_server_with_a_key_is_not_saved(tmp_path: Path) -> None:
    with live(lambda: FakeClient("From afar"), api_keys=("sesame",)) as server:
        chat = Terminal(tmp_path, "--url", server.url, "--api-key", "sesame")
        chat.type("", "> ")
        chat.type("a secret\n", "From afar")
        chat.type("", "> ")
        chat.leave()
    assert list(tmp_path.iterdir()) == []


def test_control_characters_of_an_answer_are_replaced(tmp_path: Path) -> None:
    with live(lambda: FakeClient("red \x1b[31m\x07\x9b2J\r\tend")) as server:
        chat = Terminal(tmp_path, "--url", server.url)
        chat.type("", "> ")
        assert "red ?[31m??2J" in chat.type("hi\n", "end")
        chat.type("", "> ")
        chat.leave()


def test_prompt_is_written_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    master, slave = pty.openpty()
    os.write(master, b"hello\n")
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert next(typed_messages()) == "hello"
    os.close(master)
    assert capsys.readouterr() == ("", "> ")


@pytest.mark.parametrize(
    "lines, messages",
    [
        (["one", "two"], ["one", "two"]),
        (["one\\", "two", "three"], ["one\ntwo", "three"]),
        (['"""one', "", 'two"""', "three"], ["one\n\ntwo", "three"]),
        (['"""', "one", '"""'], ["\none\n"]),
        (['"""one"""', "two"], ["one", "two"]),
        (['"""one', "two"], ["one\ntwo"]),
        (["one\\"], ["one"]),
    ],
)
def test_message_may_span_lines(monkeypatch: pytest.MonkeyPatch, lines: list[str], messages: list[str]) -> None:
    typed = iter(lines)

    def line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("fd_core.cli.chats.conversation._line", line)
    assert [message.removesuffix("\n") for message in typed_messages()] == [
        message.removesuffix("\n") for message in messages
    ]


def test_ctrl_c_discards_a_multi_line_message_or_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one\\", KeyboardInterrupt(), "two", KeyboardInterrupt(), "never"])

    def line(prompt: str) -> str:
        if isinstance(next_one := next(typed), KeyboardInterrupt):
            raise next_one
        return str(next_one)

    monkeypatch.setattr("fd_core.cli.chats.conversation._line", line)
    assert list(typed_messages()) == ["two"]


def test_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    talk = ChatHistory("Be brief.")
    talk.answered("Où?", "Là.")
    file = tmp_path / "talk.json"
    assert talk.command(f"/save {file}") == f"saved 3 messages in {file}"
    talk.command(f"/save {file}")  # a saved conversation may be overwritten
    other = ChatHistory()
    assert other.command(f"/load {file}") == f"loaded 3 messages from {file}"
    assert (other.messages, other.system) == (talk.messages, "Be brief.")
    other.command("/reset")
    assert other.messages == [{"role": "system", "content": "Be brief."}]
    assert other.command("/system Be long. ") == "system: Be long."
    assert other.command("/system") == "system: Be long."
    assert other.messages == [{"role": "system", "content": "Be long."}]


def test_failed_command_changes_nothing(tmp_path: Path) -> None:
    talk = ChatHistory()
    talk.answered("a", "b")
    before = talk.messages
    mine = tmp_path / "mine.txt"
    mine.write_text("not a conversation")
    for line, words in (
        (f"/save {mine}", "is not a saved conversation"),
        (f"/load {mine}", "is not a saved conversation"),
        (f"/load {tmp_path / 'absent'}", "no such file"),
        (f"/save {tmp_path / 'absent' / 'x'}", "cannot write"),
        (f"/save {tmp_path / ('x' * 300)}", "file name too long"),
        (f"/save {tmp_path}/x\0y", "null byte"),
        (f"/save {tmp_path}", "is not a file"),
        ("/save ~no-such-user/x", "is unknown"),
        ("/load ~no-such-user/x", "is unknown"),
        ("/load /dev/zero", "is not a file"),
        ("/save", "requires a file name"),
        ("/sysem x", "unknown command /sysem"),
    ):
        with pytest.raises(ConfigError, match=words):
            talk.command(line)
    assert talk.messages == before
    assert mine.read_text() == "not a conversation"
    assert talk.command("/etc/passwd is what?") is None


def test_failed_save_leaves_the_file_unchanged(tmp_path: Path) -> None:
    talk = ChatHistory()
    file = tmp_path / "talk.json"
    talk.command(f"/save {file}")
    before = file.read_bytes()
    talk.answered("\ud800", "a lone surrogate")
    with pytest.raises(ConfigError, match="cannot write"):
        talk.command(f"/save {file}")
    assert file.read_bytes() == before


def test_token_rate_excludes_the_first_token() -> None:
    clock = iter([0.0, 2.0, 3.0, 4.0])
    speed = AnswerSpeed(lambda: next(clock))
    assert speed.summary() is None
    for tokens in (1, 4, 4):
        speed.count(tokens)
    assert speed.summary() == "[9 tokens, 4.0 tokens/s, first after 2.00 s]"
