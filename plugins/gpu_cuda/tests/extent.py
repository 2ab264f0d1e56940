"""How much the tests try: a sample, or all with FD_GPU_ALL=1."""

from __future__ import annotations

import os


def everything() -> bool:
    """Whether all cases are tried, not only a sample of them."""
    return os.environ.get("FD_GPU_ALL", "") not in ("", "0")
