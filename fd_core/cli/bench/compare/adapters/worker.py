"""Runs inside one engine's own environment and speaks JSON lines: load, run, quit.

Standard output carries the protocol alone; all output of the engine goes to standard error. Only the standard library
and the engine are imported here, so a peer's environment needs nothing else.

    -> {"op": "load", "engine": "vllm", "model": {...}, "threads": 2, "max_requests": 32, "max_length": 640}
    <- {"ok": true, "version": "...", "load_s": 12.3, "notes": {...}}
    -> {"op": "run", "prompts": [[1, 2, 3]], "max_tokens": [128]}
    <- {"ok": true, "wall_s": 1.5, "counters": {}, "requests": [{"token_ids": [...], "ttft_s": 0.1, "end_s": 1.5}]}

`settings` of a load message are further keyword arguments of the adapter's `library`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve requests from standard input until its end or a quit message."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    del sys.path[0]  # a module here must not shadow one that an engine imports
    engine: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["op"] == "quit":
                break
            if message["op"] == "load":
                engine, reply = _load(message)
            else:
                reply = _run(engine, message)
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; the harness reports it and goes on
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _load(message: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    start = time.perf_counter()
    library = runpy.run_path(str(Path(__file__).with_name(f"{message['engine']}.py")))["library"]
    engine = library(
        model=message["model"],
        threads=message["threads"],
        max_requests=message["max_requests"],
        max_length=message["max_length"],
        **message.get("settings", {}),
    )
    load_s = time.perf_counter() - start
    return engine, {"ok": True, "version": engine.version, "load_s": load_s, "notes": engine.notes}


def _run(engine: Any, message: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    finished = engine.run(message["prompts"], message["max_tokens"])
    wall_s = time.perf_counter() - start
    requests = [{"token_ids": tokens, "ttft_s": first - start, "end_s": end - start} for tokens, first, end in finished]
    return {"ok": True, "wall_s": wall_s, "counters": getattr(engine, "counters", {}), "requests": requests}


if __name__ == "__main__":
    main()
