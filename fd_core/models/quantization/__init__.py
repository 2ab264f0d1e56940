"""Weights in fewer bits than they are stored in, at load or as a new folder."""
