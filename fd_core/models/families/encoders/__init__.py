"""Families of encoders: models of texts that are computed whole, for vectors, classes and scores."""
