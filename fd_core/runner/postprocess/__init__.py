"""Postprocessing: what was sampled, which drafts were accepted and which slots were revoked become the token matrix."""
