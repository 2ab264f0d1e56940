"""Anthropic's Messages API: what it asks for becomes a chat, what comes of it its blocks and events."""

from __future__ import annotations

from fd_core.server.messages.routes import router

__all__ = ["router"]
