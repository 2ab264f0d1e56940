"""Files that an engine needs before it starts: the checkpoint and its tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from fd_core import plugins
from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.config.generation import GenerationDefaults
from fd_core.config.paths import user_path
from fd_core.disagg.keys import transfer_key
from fd_core.engine.loaded_adapters import lora_modules
from fd_core.errors import ModelError
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.secret import load_secret
from fd_core.models.catalog import ResolvedModel, resolve_model
from fd_core.models.fallback.choice import choose_implementation
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.models.fetching.packaged import ProgressSink
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.files import read_json_object
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import image_processor_of
from fd_core.runner.drafting import FLAG, check_drafter
from fd_core.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

_log = logging.getLogger(__name__)
_SHOWN_TOKENS: Final = 8


class Assets(msgspec.Struct, frozen=True):
    """A model on this machine."""

    name: str
    path: Path | None
    """The checkpoint; None for a backend that needs none."""
    tokenizer: Tokenizer
    config: EngineConfig
    """Settings with which the engine starts; the draft model, if any, is a path."""
    images: ImageProcessor | None = None
    """None for a model that takes no images."""


def find_assets(config: EngineConfig, progress: ProgressSink | None = None) -> Assets:
    """Find the configured model, fetching it if necessary, and read its tokenizer.

    A backend that needs no checkpoint accepts any model name, and its tokens are bytes. The plugins, secrets and
    adapters that `config` names are looked up first, so that nothing is fetched for an invalid configuration. Raises
    `ConfigError`, `ModelError` or `PluginError`.
    """
    known = plugins.installed_plugins()
    known.load(plugins.SCHEDULER, config.scheduler)
    known.load(plugins.SCHEDULING_POLICY, config.scheduling_policy)
    known.load(plugins.VICTIMS, config.victim_policy)
    for kind, name in ((plugins.POSTPROCESS, config.postprocess), (plugins.OBSERVER, config.observer)):
        if name is not None:
            known.find(kind, name)  # imported where the engine runs, with its framework
    if config.kv_store is not None:
        known.find(plugins.STORE, parse_location(config.kv_store).scheme)
        load_secret(config.kv_store_secret_file)
    lora_modules(config)
    if config.role != "mixed":
        transfer_key(config.transfer_secret_file)
    if config.speculative is not None:
        check_drafter(known.load(plugins.DRAFTER, config.speculative.method), config.speculative)
    if config.backend != "auto" and not known.choose_backend(config.backend).cls.needs_checkpoint:
        return Assets(config.model, None, byte_tokenizer(), config=config)
    found = resolve_model(config.model, revision=config.revision, progress=progress)
    if config.speculative is not None:
        config = msgspec.structs.replace(config, speculative=_with_draft_model(config.speculative, progress))
    checkpoint = open_checkpoint(found.path)
    try:
        built_in = choose_implementation(checkpoint, config.model_impl) == "fd_core"
        images = image_processor_of(checkpoint) if built_in and not config.language_model_only else None
        tokenizer = load_tokenizer(checkpoint)
        _report_missing_rows(tokenizer, checkpoint)
        config = _with_generation(config, found, checkpoint)
        return Assets(found.name, found.path, tokenizer, config=config, images=images)
    finally:
        checkpoint.close()


def _report_missing_rows(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Log a warning that names tokens without an embedding row: prompts that contain one are rejected."""
    rows = checkpoint.config.get("vocab_size")
    if not isinstance(rows, int) or not (missing := tokenizer.tokens_from(rows)):
        return
    listed = ", ".join(f"{text[:40]!r} = {token_id}" for token_id, text in list(missing.items())[:_SHOWN_TOKENS])
    _log.warning(
        "%s: %d tokens of the tokenizer have no embedding row in the model (it has %d): %s%s. Prompts with such a "
        "token are rejected; resize the model's embedding or remove the tokens",
        checkpoint.path,
        len(missing),
        rows,
        listed,
        ", ..." if len(missing) > _SHOWN_TOKENS else "",
    )


def _with_generation(config: EngineConfig, found: ResolvedModel, checkpoint: Checkpoint) -> EngineConfig:
    """Read the default sampling parameters, so that the engine need not look them up again."""
    source = config.generation_config
    defaults = GenerationDefaults()
    if source == "auto":
        values, origin = checkpoint.generation_config, str(checkpoint.path)
        defaults = found.generation
    elif source != "none":
        path = user_path(source, "--generation-config")
        origin = str(path / "generation_config.json" if path.is_dir() else path)
        values = read_json_object(Path(origin))
    if source != "none":
        try:
            defaults = defaults.updated(GenerationDefaults.read(values))
        except ValueError as error:
            message = f"{origin}: generation_config: {error}"
            raise ModelError(message, hint="correct it, or ignore it with --generation-config none") from error
    defaults = defaults.updated(config.override_generation_config)
    return msgspec.structs.replace(config, generation_config="none", override_generation_config=defaults)


def _with_draft_model(speculative: SpeculativeConfig, progress: ProgressSink | None) -> SpeculativeConfig:
    """Find the draft model, fetching it if necessary, and name it by its path."""
    if speculative.model is None:
        return speculative
    try:
        found = resolve_model(speculative.model, progress=progress)
    except ModelError as error:
        raise ModelError(f"draft model: {error.message}", field=FLAG, hint=error.hint) from error
    return msgspec.structs.replace(speculative, model=str(found.path))
