"""Extent of the tests: a sample, or all cases with FD_GPU_ALL=1, as in `nox -s kernels`."""

from __future__ import annotations

import os

import pytest

AT_LENGTH = pytest.mark.at_length
"""Leaves a test or a case out of the sample."""


def everything() -> bool:
    """Return True if all cases are tested, not only a sample."""
    return os.environ.get("FD_GPU_ALL", "") not in ("", "0")
