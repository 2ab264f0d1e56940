"""Postprocessing: builds the token matrix from sampled tokens, accepted drafts and preempted slots."""
