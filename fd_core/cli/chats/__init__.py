"""Chatting with a model in the terminal: `fdcore chat` and `fdcore complete`."""
