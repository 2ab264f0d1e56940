"""Another commit of fd_core as a library; its counters may have other names, so none are read."""

from __future__ import annotations

from . import fd_core_llm


class Engine(fd_core_llm.Engine):
    """`LLM` of the commit that the environment holds."""

    counted = ()
