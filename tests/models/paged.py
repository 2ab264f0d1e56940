"""The kit's driver of a forward pass over a paged cache."""

from fd_core.testing.models.paged import BLOCK_SIZE, PagedDriver, Row

__all__ = ["BLOCK_SIZE", "PagedDriver", "Row"]
