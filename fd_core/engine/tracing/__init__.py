"""The trace of a run: its format, writer, reader, and conversion for other tools."""
