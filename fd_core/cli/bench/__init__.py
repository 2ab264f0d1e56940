"""`fdcore bench`: speed of an engine alone, with a batch, and of its server."""
