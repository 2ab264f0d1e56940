"""Inputs of a model, built from a plan."""
