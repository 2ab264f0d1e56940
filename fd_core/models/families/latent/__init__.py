"""Families whose heads share one latent vector per token (multi-head latent attention, MLA)."""
