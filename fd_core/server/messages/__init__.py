"""Anthropic's Messages API: what it asks for becomes a chat, what comes of it its blocks and events."""
