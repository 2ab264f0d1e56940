"""Choice of the implementation of a model: a family of fd_core, or the code of `transformers`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from fd_core.errors import ConfigError, ModelError
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.registry import architecture_of, config_of

FLAG = "--model-impl"
_GENERATES = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes with an output projection over the vocabulary."""


def choose_implementation(
    checkpoint: Checkpoint, setting: str, framework: str | None = None
) -> Literal["fd_core", "transformers"]:
    """Return the implementation that serves a checkpoint under a setting of `--model-impl`; reads only its config.

    `framework` is that of the pack, None if it is not known yet. Raises `ModelError` if nothing serves it.
    """
    if setting != "transformers":
        try:
            architecture_of(config_of(checkpoint))
            return "fd_core"
        except ModelError as error:
            if setting == "fd_core":
                raise
            if problem := _problem(checkpoint, framework):
                remedy = f"{FLAG} transformers cannot serve it, either: {problem}; {error.hint}"
                raise ModelError(error.message, hint=remedy) from None
            return "transformers"
    if problem := _problem(checkpoint, framework):
        raise ModelError(f"{checkpoint.path}: {FLAG} transformers cannot serve it: {problem}", field=FLAG)
    return "transformers"


def require_one_rank(ranks: int) -> None:
    """Raise `ConfigError` if several ranks are to compute a model of `transformers`."""
    if ranks > 1:
        raise ConfigError(
            f"a model that transformers computes runs on one rank, got {ranks}",
            field=FLAG,
            hint="leave out --tensor-parallel-size and --pipeline-parallel-size",
        )


def _problem(checkpoint: Checkpoint, framework: str | None) -> str:
    """Return why the code of `transformers` cannot serve a checkpoint, "" if it may; imports no framework."""
    if framework not in (None, "torch", "numpy"):
        return f"tensors of torch cannot share the memory of arrays of {framework}; use --backend cpu"
    if any(find_spec(package) is None for package in ("torch", "transformers")):
        return "it needs pip install 'fd-core[transformers]'"
    import transformers

    name = "".join(config_of(checkpoint).strings("architectures")[:1])
    if name.endswith(_GENERATES) and name in dir(transformers):
        return ""
    code = ", and code shipped with the checkpoint (auto_map) is never run" if "auto_map" in checkpoint.config else ""
    return f"transformers {transformers.__version__} has no language model {name[:80]!r}{code}"
