"""The engine: its loop, output processing, process boundary and clients."""
