"""`fdcore bench`: how fast an engine is, alone, with a batch, and behind its server."""
