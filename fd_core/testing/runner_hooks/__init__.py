"""Kits for hooks of the runner: derive a class from a suite and name the plugin."""
