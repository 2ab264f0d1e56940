"""Format of log lines: text for people, or one JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import time
from typing import Final

ACCESS_LOGGER: Final = "fd_core.access"
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logs(level: str, form: str, *, text: str = _TEXT, access: bool = False) -> None:
    """Write log lines of this process to stderr, as `text` or as `json`; with `access` the access log too."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO if access else logging.CRITICAL)


def one_word(text: str, longest: int) -> str:
    """Return a text of unknown origin as one word that log readers cannot mistake for anything else."""
    cut = text[:longest]
    if not cut.isascii() or not cut.isprintable() or " " in cut or "\\" in cut:
        cut = "".join(letter if "!" <= letter <= "~" and letter != "\\" else _escaped(letter) for letter in cut)
    return cut if len(text) <= longest else f"{cut}..."


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


class _JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and the content of the line's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
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
