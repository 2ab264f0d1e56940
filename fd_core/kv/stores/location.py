"""Locations of KV stores: the value of `--kv-store`, parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from fd_core.config.sizes import parse_size
from fd_core.errors import ConfigError

__all__ = ["StoreLocation", "parse_location"]

_SCHEME = re.compile(r"[a-z0-9_+]+")
_SECRETS = re.compile(r"//.*@")
_FIELD = "--kv-store"


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """`scheme:rest?name=value&...`, such as `disk:/var/kv?max_bytes=20Gi` or `redis://127.0.0.1:6379/0`."""

    scheme: str
    text: str = field(repr=False)
    """The location up to the `?`, scheme included; may hold a password."""
    parameters: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def rest(self) -> str:
        """The text after the scheme's colon."""
        return self.text[len(self.scheme) + 1 :]

    @property
    def shown(self) -> str:
        """The location without user, password and parameters, for logs and users."""
        return _without_secrets(self.text)

    def require_known(self, *names: str) -> None:
        """Raise `ConfigError` unless every parameter is one of `names`."""
        for name in self.parameters:
            if name not in names:
                raise ConfigError(
                    f"{self.shown} has no parameter {name!r}",
                    field=_FIELD,
                    hint=f"valid parameters: {', '.join(names) or 'none'}",
                )

    def size(self, name: str) -> int | None:
        """Return the size in bytes of a parameter, None if it is absent. Raises `ConfigError` if it is not a size."""
        if name not in self.parameters:
            return None
        try:
            return parse_size(self.parameters[name])
        except ValueError as error:
            raise ConfigError(f"{name} of {self.shown}: {error}", field=_FIELD) from error


def parse_location(text: str) -> StoreLocation:
    """Parse a location. Raises `ConfigError` if `text` names no scheme or its parameters are not name=value pairs."""
    base, mark, query = text.partition("?")
    scheme, colon, _ = base.partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise ConfigError(
            f"{_without_secrets(base)!r} has no store scheme",
            field=_FIELD,
            hint="write disk:FOLDER, redis://HOST:PORT/DB or another store's scheme",
        )
    if "@" in query:
        # The ? may be part of a password, so no part of the text can be shown.
        raise ConfigError(
            f"the location of the {scheme} store has an @ after a ?",
            field=_FIELD,
            hint="write %40 for an @ in a parameter, and %3F for a ? in a user's name or password",
        )
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(mark))
    except ValueError:
        pairs = []
    if (mark and not pairs) or len(dict(pairs)) < len(pairs):
        # The message omits the parameters: one of them may be a password.
        raise ConfigError(
            f"the parameters of {_without_secrets(base)} are malformed",
            field=_FIELD,
            hint="write NAME=VALUE pairs after the ?, separated by &, each name once",
        )
    return StoreLocation(scheme, base, dict(pairs))


def _without_secrets(base: str) -> str:
    # Up to the last @: a password may hold any of : / @ if its owner did not escape it.
    return _SECRETS.sub("//", base)
