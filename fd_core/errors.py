"""Errors for users: the fault, the field, the limit and the remedy.

Each class carries the process exit code that a command ends with when the error reaches it.
"""

from __future__ import annotations

__all__ = ["BadRequest", "ConfigError", "EngineDead", "FdError", "ModelError", "PluginError"]


_MAX_MESSAGE = 1500


class FdError(Exception):
    """Base of every error whose text is written for users.

    `field` names the flag, file or request field at fault, and of a `ModelError` is `model` unless it is given; `hint`
    is the remedy; `code` identifies the error of a request for programs, as OpenAI's errors do.
    """

    exit_code = 1
    _usual_field: str | None = None

    def __init__(
        self, message: str, *, field: str | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        # The message may quote a file or a request, and be of any length.
        message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        super().__init__(message)
        self.message = message
        self.field = self._usual_field if field is None else field
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


class ConfigError(FdError):
    """The command line, an environment variable or a settings file cannot be used."""

    exit_code = 2


class ModelError(FdError):
    """A model is unknown, unreadable, damaged or not supported."""

    exit_code = 3
    _usual_field = "model"


class PluginError(FdError):
    """A plugin is missing, unavailable, broken or built for another contract version."""

    exit_code = 4


class BadRequest(FdError, ValueError):
    """A request is malformed or out of range; reported as HTTP 400 in OpenAI's format."""


class EngineDead(FdError):
    """The engine's process ended or does not respond; reported as HTTP 503.

    `field` is `rank N` if one of several ranks is at fault.
    """

    exit_code = 5
