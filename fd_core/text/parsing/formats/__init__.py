"""The formats in which models write tool calls."""
