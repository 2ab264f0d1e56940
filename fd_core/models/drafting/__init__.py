"""Heads that draft from hidden states of a model: computing them, and training them."""
