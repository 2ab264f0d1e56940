"""From `--speculative-config` to a drafter."""

from __future__ import annotations

from pathlib import Path

from fd_core.backends.contract import Backend, LoadProgress, Model
from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.errors import ConfigError, ModelError
from fd_core.ops.contract import Ops
from fd_core.runner.drafting.contract import FLAG, DraftContext, Drafter


def check_drafter(drafter: type[Drafter], config: SpeculativeConfig) -> None:
    """Check that a drafter reads what it was given. Raises `ConfigError`."""
    if drafter.uses_model and config.model is None:
        raise ConfigError(
            f"{config.method} drafts with a model, but none is named",
            field=FLAG,
            hint='give "model": a name, a folder or a .gguf file',
        )
    if config.model is not None and not drafter.uses_model:
        raise ConfigError(f"{config.method} drafts without a model, but {config.model!r} is named", field=FLAG)
    unknown = sorted(set(config.options) - set(drafter.options))
    if unknown:
        raise ConfigError(
            f"{config.method} does not read {', '.join(unknown)}",
            field=FLAG,
            hint=f"it reads {', '.join(drafter.options) or 'no options'}",
        )


def make_drafter(
    drafter: type[Drafter], config: EngineConfig, backend: Backend, ops: Ops, model: Model, progress: LoadProgress
) -> Drafter | None:
    """Make a drafter for the loaded `model`, which shares its backend and pack; None without speculation.

    Raises `ConfigError` or `ModelError`.
    """
    speculative = config.speculative
    if speculative is None or not speculative.num_speculative_tokens:
        return None

    def load(path: Path) -> Model:
        try:
            return backend.load_model(path, ops, progress)
        except (ConfigError, ModelError) as error:
            raise type(error)(f"draft model: {error.message}", field=FLAG, hint=error.hint) from error

    check_drafter(drafter, speculative)
    return drafter(
        DraftContext(
            num_slots=config.max_num_seqs,
            vocab_size=model.vocab_size,
            block_size=config.block_size,
            cheap_tokens=speculative.cheap_tokens,
            ops=ops,
            model_path=Path(speculative.model or ""),
            load_model=load,
            options=speculative.options,
            kv_cache_dtype=config.kv_cache_dtype,
        )
    )
