"""Families of models: how the configs and tensors of each describe a decoder."""
