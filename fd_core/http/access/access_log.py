"""The access log: one line for each request, without prompts, texts, keys and query strings."""

from __future__ import annotations

import logging
from typing import Final

from fd_core.config.logs import ACCESS_LOGGER, one_word
from fd_core.http.access.record import RequestRecord

CLIENT_LEFT: Final = 499
"""Status of a request whose client left before the answer ended."""
_LONGEST_PATH: Final = 256
_LONGEST_METHOD: Final = 16
log = logging.getLogger(ACCESS_LOGGER)


def log_access(client: str, method: str, path: str, status: int, seconds: float, record: RequestRecord) -> None:
    """Write the line of an answer that is over; `path` is without its query, which may hold secrets."""
    key = record.key.name or "unnamed" if record.key is not None else "-"
    fields = {
        "client": client,
        "method": one_word(method, _LONGEST_METHOD),
        "path": one_word(path, _LONGEST_PATH),
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
