"""Families of models that take images: a text model, and an encoder of images in front of it."""
