"""The kit's layer with random weights, on any pack."""

from fd_core.testing.models.layers import ROWS, Geometry, LayerOn

__all__ = ["ROWS", "Geometry", "LayerOn"]
