"""Anthropic's Messages API: its requests are converted to chats, the results to its blocks and events."""
