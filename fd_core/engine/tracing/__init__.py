"""The trace of a run: its format, its writer beside the engine, its reader, and its form for other tools."""
