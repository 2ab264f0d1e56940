"""The access log: one line for each request, without prompts, texts, keys and query strings."""

from __future__ import annotations

import logging
from typing import Final

from fd_core.logs import ACCESS_LOGGER
from fd_core.server.access.record import RequestRecord

__all__ = ["CLIENT_LEFT", "log_access", "shown"]

CLIENT_LEFT: Final = 499
"""Status of a request whose client left before the answer ended."""
_LONGEST_PATH: Final = 256
_LONGEST_METHOD: Final = 16
log = logging.getLogger(ACCESS_LOGGER)


def log_access(client: str, method: str, path: str, status: int, seconds: float, record: RequestRecord) -> None:
    """Write the line of a request whose answer is over.

    `client` is the address at the other end of the connection. `path` is as it was asked for, without its query, which
    may hold secrets.
    """
    key = record.key.name or "unnamed" if record.key is not None else "-"
    fields = {
        "client": client,
        "method": shown(method, _LONGEST_METHOD),
        "path": shown(path, _LONGEST_PATH),
        "status": status,
        "seconds": round(seconds, 6),
        "tokens_in": record.tokens_in,
        "tokens_out": record.tokens_out,
        "request_id": record.request_id,
        "key": key,
    }
    log.info(
        "%s %s %s %d %.3f s in=%d out=%d id=%s key=%s",
        *(fields["client"], fields["method"], fields["path"], status, seconds),
        *(record.tokens_in, record.tokens_out, record.request_id, key),
        extra={"fields": fields},
    )


def shown(text: str, longest: int) -> str:
    """Return a text of a client's as one word that no reader of the log takes for something else."""
    cut = text[:longest]
    if not cut.isascii() or not cut.isprintable() or " " in cut or "\\" in cut:
        cut = "".join(letter if "!" <= letter <= "~" and letter != "\\" else _escaped(letter) for letter in cut)
    return cut if len(text) <= longest else f"{cut}..."


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
