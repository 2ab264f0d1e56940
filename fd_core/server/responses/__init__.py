"""OpenAI's Responses API: its requests are converted to chats, the results to its items and numbered events."""
