"""OpenAI's Responses API: what it asks for becomes a chat, what comes of it its items and numbered events."""
