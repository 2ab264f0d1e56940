"""`fdcore bench compare`: fd_core and other engines on the same weights, prompts and threads, in interleaved rounds."""
