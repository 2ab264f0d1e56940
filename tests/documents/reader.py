"""Runs a page as a reader with terminals: starts servers, sends requests, writes files, runs scripts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.documents.blocks import ROOT, Block
from tests.documents.lent_servers import LentServers
from tests.plugin_sites import installed
from tests.server.processes import free_port, process
from tests.server.redis_server import redis_server

__all__ = ["Reader", "commands"]

_ADDRESS = re.compile(r"(?P<before>(?:127\.0\.0\.1|localhost|0\.0\.0\.0):|--(?:admin-)?port[ =])(?P<port>\d+)\b")
_SERVER_SECONDS = 120
_COMMAND_SECONDS = 280
_REDIS = 6379
SHARED = re.compile(
    r"fdcore serve smollm2(?: --port \d+)?"
    r"|fdcore route --worker http://127\.0\.0\.1:8001 --worker http://127\.0\.0\.1:8002"
    r" --policy cache_aware --tokenizer smollm2"
)
"""Servers that pages may share one after the other: they write nothing to a folder, and no page changes them."""
_SERVERS = (["fdcore", "serve"], ["fdcore", "route"], ["fdcore", "cluster", "serve"])


@dataclass(frozen=True, slots=True)
class _Running:
    """Server that runs in one of the terminals."""

    command: str
    port: int
    log: Path
    ends: AbstractContextManager[subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]
    lent: bool


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, each as a whole: quotes and backslashes join lines.

    A block that shows a terminal has a `$` before each command.
    """
    shown = text.startswith("$ ")
    found: list[str] = []
    begun = ""
    for line in text.splitlines():
        if not begun and shown:
            if not line.startswith("$ "):
                continue  # what the command printed
            line = line.removeprefix("$ ")
        begun += line
        if begun.endswith("\\") or not _whole(begun):
            begun += "\n"
            continue
        if shlex.split(begun, comments=True):
            found.append(begun)
        begun = ""
    assert not begun, f"incomplete command: {begun}"
    return found


def _whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


class Reader:
    """Follows one page in a folder; servers that a block starts keep running for the blocks after it.

    Ports of the page are mapped to free ports. A server on the port of an earlier one replaces it, since the page asks
    to stop that one first. `close` ends every server with Ctrl-C, in order and without a traceback. `instead` maps
    patterns in commands and scripts to replacements. Servers of `lent` are already running, for pages that start them
    with the same command. A page that names a Redis at its usual port gets one.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str],
        instead: Mapping[str, str] | None = None,
        lent: LentServers | None = None,
    ) -> None:
        self.folder = folder
        self._instead = dict(instead or {})
        self._lent = lent
        self._redis: Any = None
        self._site = folder / "bin"
        self._site.mkdir()
        for name, module in (("fdcore", " -m fd_core.cli"), ("pytest", " -m pytest"), ("python", "")):
            (self._site / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
            (self._site / name).chmod(0o755)
        self._ports: dict[int, int] = {}
        self._servers: dict[int, _Running] = {}
        self._started = 0
        self._paths = [str(ROOT)]
        self._settings = dict(settings)

    def close(self) -> None:
        """End every server, routers before their workers."""
        with ExitStack() as stack:
            for running in self._servers.values():
                stack.push(running.ends.__exit__)
        self._servers.clear()
        if self._redis is not None:
            self._redis.close()

    def follow(self, block: Block) -> str:
        """Execute a block; return its output. Raises AssertionError with the output on a failure."""
        if block.language in ("sh", "bash", "console"):
            return "".join(self.run(command) for command in commands(block.text))
        if block.file is not None:
            # A deployment file has no address: its routers listen on the default port.
            text = block.text.replace("[router]\n", f"[router]\nport = {self._port(8000)}\n")
            (self.folder / block.file).write_text(self._here(text))
            return ""
        assert block.language == "python", (
            f"{block}: the reader cannot run {block.language or 'a block without a language'}"
        )
        return self._python(block)

    def restart(self, port: int) -> None:
        """Stop the server at a port of the page with Ctrl-C, and start it again with the same command."""
        self._start(self._servers[port].command, port)

    def run(self, command: str) -> str:
        """Run one command of a shell and return what it printed; a server keeps running in a separate terminal."""
        command = self._shorter(command)
        parts = command.split(" && ")
        if len(parts) > 1 and any(_own(part) for part in parts):
            return "".join(self.run(part) for part in parts)
        words = shlex.split(command, comments=True)
        if _serves(words):
            self._start(command, int(_flag(words, "--port") or 8000))
            return ""
        if words[0] == "cd":
            self.folder /= words[1]
            return ""
        if words[:2] == ["pip", "install"]:
            self._installs(words[2:])
            return ""
        if words[:2] == ["fdcore", "install"]:
            assert (ROOT / "plugins" / words[2] / "pyproject.toml").is_file(), command
            return ""
        if words[0] == "curl":
            self._wait(command)
            command = command.replace("curl ", "curl --silent --show-error --fail-with-body --max-time 120 ", 1)
        if words[0] == "python" and (script := self.folder / words[1]).is_file():
            self._wait(script.read_text())
            script.write_text(self._here(script.read_text()))
        return self._run(["bash", "-ec", self._here(command)], command)

    def _python(self, block: Block) -> str:
        self._wait(block.text)
        return self._run([sys.executable, "-c", self._here(self._shorter(block.text))], str(block))

    def _shorter(self, text: str) -> str:
        for written, shorter in self._instead.items():
            text = re.sub(written, shorter, text)
        return text

    def _run(self, command: list[str], shown: str) -> str:
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_SECONDS,
        )
        assert ended.returncode == 0, f"{shown}\n{ended.stdout}{ended.stderr}{self._logs()}"
        return ended.stdout + ended.stderr

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": os.pathsep.join([str(self._site), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(self._paths),
            "COLUMNS": "200",
            "FD_BATCH_STORE": str(self._site.parent / "batches"),  # two servers cannot share the usual one
            **self._settings,
        }

    def _start(self, command: str, port: int) -> None:
        if port in self._servers:
            ended = self._servers.pop(port)
            ended.ends.__exit__(None, None, None)
            if ended.lent:
                del self._ports[port]  # it still runs there
        if f"redis://127.0.0.1:{_REDIS}" in command and self._redis is None:
            self._redis = redis_server(port=self._port(_REDIS))
        if self._lent is not None and SHARED.fullmatch(command.strip()) and port not in self._ports:
            self._borrow(self._lent, command, port)
        else:
            self._start_own(command, port)
        _until(self._servers[port], "/health", (200, 503))

    def _borrow(self, lent: LentServers, command: str, port: int) -> None:
        words = shlex.split(self._here(command), comments=True)[1:]
        if "--port" in words:
            at = words.index("--port")
            del words[at : at + 2]
        ends = lent.lend(words)
        server = ends.__enter__()
        self._ports[port] = server.port
        self._servers[port] = _Running(command, server.port, server.log, ends, server.process, lent=True)

    def _start_own(self, command: str, port: int) -> None:
        words = shlex.split(self._here(command), comments=True)
        if words[1] != "cluster" and _flag(words, "--port") is None:
            words += ["--port", str(self._port(port))]
        if words[1] == "route" and _flag(words, "--admin-port") is None:
            words += ["--admin-port", str(self._port(8081))]
        self._started += 1
        log = self.folder / f"terminal-{self._started}.log"
        ends = process(log, str(self._site / words[0]), *words[1:], cwd=self.folder, env=self._environment())
        self._servers[port] = _Running(command, self._port(port), log, ends, ends.__enter__(), lent=False)

    def _wait(self, text: str) -> None:
        """Wait until all servers are ready, as a reader would; begin with the one that the command addresses."""
        asked = {int(found["port"]) for found in _ADDRESS.finditer(text)}
        if 8000 in asked and 8000 not in self._servers:
            self._start("fdcore serve smollm2", 8000)
        for running in self._servers.values():
            _until(running, "/ready", (200,))

    def _here(self, text: str) -> str:
        return _ADDRESS.sub(lambda found: f"{found['before']}{self._port(int(found['port']))}", text)

    def _port(self, written: int) -> int:
        """Return the port that replaces one of the page; the next port is free, too."""
        if written not in self._ports:
            self._ports[written] = free_port()
        return self._ports[written]

    def _installs(self, words: list[str]) -> None:
        """Find the package to install: a folder and its extras, or a package that an extra or a session names."""
        if words[0] == "-e":
            path, extras = re.fullmatch(r"([^\[\]]+)(?:\[([\w,]+)\])?", words[1]).groups()  # type: ignore[union-attr]
            project = self.folder if (self.folder / "pyproject.toml").is_file() else ROOT
            known = tomllib.loads((project / path / "pyproject.toml").read_text())["project"]
            assert set((extras or "").split(",")) <= {"", *known.get("optional-dependencies", {})}, words
            if project == self.folder:
                installed(self.folder)
                self._paths.insert(0, str(self.folder))
            return
        known_names = (ROOT / "pyproject.toml").read_text() + (ROOT / "noxfile.py").read_text()
        for word in words:
            assert re.search(rf"\b{re.escape(word)}\b", known_names), f"no extra and no session has {word}"

    def _logs(self) -> str:
        return "".join(f"\n--- {each.command}\n{each.log.read_text()}" for each in self._servers.values())


def _own(command: str) -> bool:
    """Return True if the reader handles a command itself instead of the shell."""
    words = shlex.split(command, comments=True)
    return _serves(words) or words[:2] == ["pip", "install"]


def _serves(words: list[str]) -> bool:
    return any(words[: len(each)] == each for each in _SERVERS)


def _flag(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def _until(running: _Running, path: str, wanted: tuple[int, ...]) -> None:
    deadline = time.monotonic() + _SERVER_SECONDS
    while _status(f"http://127.0.0.1:{running.port}{path}") not in wanted:
        ended = running.process.poll() is not None
        assert not ended and time.monotonic() < deadline, f"{running.command}\n{running.log.read_text()}"
        time.sleep(0.05)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
