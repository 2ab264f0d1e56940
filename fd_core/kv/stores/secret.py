"""The secret that protects stored values: read from a file, made once for each user, never used directly."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fd_core.config.paths import find_cache_dir, user_path
from fd_core.errors import ConfigError

_NAME: Final = "kv-store-secret"
_NEW_BYTES: Final = 32
_MIN_BYTES: Final = 16
_MAX_BYTES: Final = 4096
_OPEN_TO_OTHERS: Final = 0o037
"""Mode bits that a secret must not have: any permission of others, and write or execute permission of the group.

The group may read, because clusters mount secrets that way.
"""


def derive(secret: bytes, purpose: str) -> bytes:
    """Return 32 bytes derived from `secret` for one purpose: HKDF with SHA-256 (RFC 5869)."""
    return HKDF(SHA256(), length=32, salt=None, info=f"fd_core KV store {purpose}".encode()).derive(secret)


def load_secret(file: str | Path | None = None, *, field: str = "--kv-store-secret-file") -> bytes:
    """Return the secret in `file`, or this user's secret from the cache folder, which the first call creates.

    A trailing newline is ignored. Engines that share a store must have the same secret, and so must
    prefill and decode workers and their router. `field` is the flag that errors name. Raises `ConfigError` if the
    secret cannot be read or created, is accessible to others, or is shorter than 16 or longer than 4096 bytes.
    """
    if file:
        return _read(user_path(file, field), field)
    own = find_cache_dir() / _NAME
    with contextlib.suppress(OSError):  # `_read` reports what is wrong
        if not own.is_file():
            _create(own, field)
    return _read(own, field)


def _read(file: Path, field: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe of that name would wait for a writer.
        with os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read(_MAX_BYTES + 2) if stat.S_ISREG(mode) else None
    except OSError as error:
        raise ConfigError(f"cannot read the secret {file}: {error.strerror or error}", field=field) from error
    if data is None:
        raise ConfigError(f"the secret {file} is not a file", field=field)
    if os.name == "posix" and mode & _OPEN_TO_OTHERS:
        raise ConfigError(f"the secret {file} is accessible to other users", field=field, hint=f"chmod 600 {file}")
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    if not _MIN_BYTES <= len(data) <= _MAX_BYTES:
        raise ConfigError(
            f"the secret {file} must have {_MIN_BYTES} to {_MAX_BYTES} bytes",
            field=field,
            hint="write random bytes into it; values stored with another secret will not be read",
        )
    return data


def _create(file: Path, field: str) -> None:
    """Create the file atomically; if several processes try at once, the first one wins."""
    draft = file.with_name(f"{_NAME}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(secrets.token_hex(_NEW_BYTES).encode() + b"\n")
                opened.flush()
                os.fsync(opened.fileno())
            with contextlib.suppress(FileExistsError):
                file.hardlink_to(draft)
        finally:
            draft.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot create the secret {file}: {error.strerror or error}",
            field=field,
            hint="pass a file with at least 16 random bytes that you own",
        ) from error
