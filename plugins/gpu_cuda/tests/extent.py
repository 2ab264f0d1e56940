"""How much the tests try: a sample, or all with FD_GPU_ALL=1, as `nox -s kernels` does."""

from __future__ import annotations

import os

import pytest

AT_LENGTH = pytest.mark.at_length
"""Leaves a test or a case out of the sample."""


def everything() -> bool:
    """Whether all cases are tried, not only a sample of them."""
    return os.environ.get("FD_GPU_ALL", "") not in ("", "0")
