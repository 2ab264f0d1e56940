"""Compare serving engines on the same prompts, the same weights and the same threads."""
