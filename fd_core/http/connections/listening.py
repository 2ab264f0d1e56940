"""Sockets and signals shared by every server of the project, and the process that uses a port."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from fd_core.errors import ConfigError
from fd_core.http.hosts import is_loopback
from fd_core.http.supervision import Supervisor

_MOST_DESCRIPTORS: Final = 2**20
"""Far more than a server uses; with a limit of billions, programs that iterate over all descriptors are delayed."""
log = logging.getLogger(__name__)

ANY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # compared, not bound
"""Hosts that stand for all addresses of the machine."""
_LISTENS: Final = "0A"
"""State of a listening socket in /proc/net/tcp."""


def bind_socket(host: str, port: int, *, flag: str = "--port", host_flag: str = "--host") -> socket.socket:
    """Bind the listening socket, 0 for any port, before loading a model. `ConfigError` names the flag at fault."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is out of range; expected 0 to 65535", field=flag)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # a label of a host name has at most 63 characters
        reason = error.strerror if isinstance(error, OSError) else "not a valid host name"
        raise ConfigError(f"the host {host!r:.300} cannot be resolved: {reason}", field=host_flag) from error
    # A reusable address can be bound twice until a socket listens, so it is the second choice, needed only while
    # connections of an earlier server linger.
    for reuse in (0, 1):
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            if reuse or error.errno != errno.EADDRINUSE:
                raise cannot_listen(host, port, error, flag=flag, host_flag=host_flag) from error
        else:
            break
    return sock


def raise_descriptor_limit() -> None:
    """Raise the descriptor limit of this process and its children to the hard limit, at most `_MOST_DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cannot_listen(
    host: str, port: int, error: OSError, *, flag: str = "--port", host_flag: str = "--host"
) -> ConfigError:
    """Return the error of a port that is not available, with the process that uses it if the system reports it."""
    reason, hint = (error.strerror or str(error)).lower(), f"choose another port with {flag}"
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        reason += f" by {holder}" if holder else ""
        hint = f"stop that process, {hint}, or use {flag} 0 for any free port"
    elif error.errno == errno.EADDRNOTAVAIL:
        flag, hint = host_flag, f"use an address of this machine, or {host_flag} 0.0.0.0 for all addresses"
    elif error.errno == errno.EACCES:
        hint = f"ports below 1024 require root; {hint}"
    return ConfigError(f"cannot listen on {host} port {port}: {reason}", field=flag, hint=hint)


@contextlib.contextmanager
def port_errors(host: str, sock: socket.socket, flag: str = "--port") -> Iterator[None]:
    """Listen on a bound socket within the block; if the port is taken, a `ConfigError` names the flag."""
    try:
        # Connections inherit this, so that lingering ones do not block the port for a restarted server.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield
    except OSError as error:
        raise cannot_listen(host, sock.getsockname()[1], error, flag=flag) from error


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    installed = []
    try:
        for number, handler in handlers.items():
            # only the main thread's loop can handle signals; otherwise the caller stops the server with `stop`
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, handler)
                installed.append(number)
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def signals_stop(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Set `stop` on the first SIGINT or SIGTERM and `hurry` on the next."""

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    with _handled({signal.SIGINT: on_signal, signal.SIGTERM: on_signal}):
        yield


@contextlib.contextmanager
def hangup_reloads(reload: Callable[[], Awaitable[None]] | None, supervisor: Supervisor) -> Iterator[None]:
    """Call `reload` on each SIGHUP, one call after the other; without it the signal ends the process, the default."""
    one_at_a_time = asyncio.Lock()

    async def run() -> None:
        async with one_at_a_time:
            if reload is not None:
                await reload()

    start = partial(supervisor.start, "reload", run, repeat=False)
    with _handled({} if reload is None else {signal.SIGHUP: start}):
        yield


def url_of(host: str, sock: socket.socket, *, secure: bool = False) -> str:
    """Return the address under which a bound socket is reached from this machine."""
    port = sock.getsockname()[1]
    shown = "localhost" if host in ANY_ADDRESS else host
    scheme = "https" if secure else "http"
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def settle() -> None:
    """Exempt all loaded objects from garbage collection: visiting them would stop every stream for 0.1 s."""
    gc.collect()
    gc.freeze()


def warn_if_open(host: str, *, keys: bool) -> None:
    """Warn about a server that other machines can reach and that requires no key."""
    if not keys and not is_loopback(host):
        log.warning(
            "%s is reachable from other machines without an API key, so any client may use it; set --api-key-file, or "
            "use --host 127.0.0.1",
            host or "every address",
        )


def port_holder(port: int) -> str | None:
    """Return the process that listens on `port`, None if unknown; without the flags of fdcore, which may be secret."""
    try:
        inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net", table), port)}
    except (OSError, ValueError):
        return None
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    pid = next((pid for pid in pids if _holds(pid, wanted)), None)
    return "a process of another user" if pid is None else _shown(pid)


def _listening(table: Path, port: int) -> list[str]:
    """Return the inodes of the sockets in a table of the system that listen on a port."""
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]


def _holds(pid: int, links: set[str]) -> bool:
    try:
        return any(str(entry.readlink()) in links for entry in Path("/proc", str(pid), "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False


def _shown(pid: int) -> str:
    try:
        words = Path("/proc", str(pid), "cmdline").read_text(errors="replace").split("\0")
        name = Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return f"process {pid}"
    for place, word in enumerate(words[:-1]):
        if word == "fd_core.cli" or word.rpartition("/")[2] == "fdcore":
            return f"`fdcore {words[place + 1]}`, process {pid}"
    return f"{name}, process {pid}"
