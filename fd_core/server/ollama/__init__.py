"""The API of Ollama: chats, completions, embeddings, and descriptions of the served model."""
