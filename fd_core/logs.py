"""How log lines look: text for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import time
from typing import Final

__all__ = ["ACCESS_LOGGER", "configure_logs"]

ACCESS_LOGGER: Final = "fd_core.access"
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logs(level: str, form: str, *, text: str = _TEXT, access: bool = False) -> None:
    """Write every log line of this process to stderr: those of `level` and above, as `text` or as `json`.

    `text` is the format of text lines, as `logging` takes it. With `access` the access log is written
    whatever the level.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if access:
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO)


class _JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and what the line's `fields` hold."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; JSON escapes every control character in it."""
        moment = time.gmtime(record.created)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", moment) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
