"""Answers that every server of the project gives: errors, health, version."""

from __future__ import annotations

import msgspec

__all__ = ["ErrorAnswer", "ErrorDetail", "HealthAnswer", "VersionAnswer"]


class ErrorDetail(msgspec.Struct):
    """What went wrong, which field, and a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class HealthAnswer(msgspec.Struct):
    """`ok`, or what is wrong."""

    status: str
    reason: str | None = None
    """Alongside `ok`: which of several engines is missing, and which background tasks fail."""


class VersionAnswer(msgspec.Struct):
    """The version of fd_core that serves."""

    version: str
