"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

PROGRAM = """
import logging
from fd_core.config.logs import configure_logs
configure_logs("{level}", "{form}", access={access})
log = logging.getLogger("a.b")
log.info("one\\n\\x1b[31mtwo %s", "three", extra={{"fields": {{"n": 1, "path": "x\\ny"}}}})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broken")
logging.getLogger("fd_core.access").info("seen")
"""


def written(level: str, form: str, *, access: bool = False) -> list[str]:
    program = PROGRAM.format(level=level, form=form, access=access)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert not ended.stdout
    return ended.stderr.splitlines()


def test_json_log_has_one_object_per_line() -> None:
    first, second, third = map(json.loads, written("info", "json", access=True))
    assert (first["message"], first["level"], first["logger"]) == ("one\n\x1b[31mtwo three", "info", "a.b")
    assert (first["n"], first["path"]) == (1, "x\ny")
    assert first["time"][10] == "T" and first["time"].endswith("Z")
    assert second["message"] == "broken" and "ZeroDivisionError" in second["traceback"]
    assert third["logger"] == "fd_core.access"


def test_text_log_has_time_level_and_logger() -> None:
    last = written("info", "text", access=True)[-1]
    assert last.endswith("INFO fd_core.access: seen") and last[:2] == "20"


def test_access_log_is_independent_of_level() -> None:
    assert [json.loads(line)["logger"] for line in written("error", "json", access=True)] == ["a.b", "fd_core.access"]
    for level in ("error", "debug"):
        assert "fd_core.access" not in [json.loads(line)["logger"] for line in written(level, "json")]


def test_import_sets_no_level() -> None:
    program = "import fd_core.config.logs, logging, sys; sys.exit(logging.getLogger('fd_core.access').level)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == logging.NOTSET
