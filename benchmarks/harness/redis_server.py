"""Private Redis server: on a Unix socket in a temporary folder, nothing on disk, ended with the `with` block."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fd_core.cli.bench.compare.processes import EngineFailedError, end

START_SECONDS = 10


@contextmanager
def running(memory_bytes: int) -> Iterator[Path]:
    """Yield its socket; raise EngineFailedError if the server is not installed or does not start."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise EngineFailedError("there is neither redis-server nor valkey-server")
    with tempfile.TemporaryDirectory(prefix="fdr", ignore_cleanup_errors=True) as folder:
        socket, log = Path(folder) / "s", Path(folder) / "log"
        command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        command += ["--maxmemory", str(memory_bytes), "--maxmemory-policy", "allkeys-lru"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            until = time.monotonic() + START_SECONDS
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise EngineFailedError(f"redis-server did not start: {log.read_text()[-500:]}")
                time.sleep(0.02)
            yield socket
        finally:
            end(process)
