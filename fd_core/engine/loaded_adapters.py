"""LoRA adapters of one engine: read and checked here, applied by the runner."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from fd_core.config import EngineConfig
from fd_core.config.paths import user_path
from fd_core.errors import BadRequest, ConfigError, ModelError
from fd_core.models.decoder import adapters_bytes
from fd_core.models.fallback.choice import choose_implementation
from fd_core.models.families.spec import DecoderSpec
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import spec_of
from fd_core.ops.parallel import Parallel
from fd_core.ops.weights import Adapter
from fd_core.types import AdapterInfo, RequestSpec

_log = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[^\s=][^\r\n=]{0,254}")


def lora_modules(config: EngineConfig) -> dict[str, Path]:
    """Return the folders of the configured adapters, by name. Raises `ConfigError`."""
    found: dict[str, Path] = {}
    for module in config.lora_modules:
        name, folder = _named_folder(module)
        if name in found:
            raise ConfigError(f"duplicate adapter name {name!r}", field="--lora-modules")
        found[name] = user_path(folder, "--lora-modules")
    if len(found) > config.max_loras:
        raise ConfigError(
            f"{len(found)} adapters exceed the limit of {config.max_loras}",
            field="--lora-modules",
            hint="raise --max-loras",
        )
    return found


def _named_folder(module: str) -> tuple[str, str]:
    """Return name and folder of NAME=FOLDER or of vLLM's JSON form."""
    hint = "use --lora-modules sql=/adapters/sql"
    name, _, folder = module.partition("=")
    if module.lstrip().startswith("{"):
        hint = """use --lora-modules '{"name": "sql", "path": "/adapters/sql"}'"""
        try:
            read = msgspec.json.decode(module, type=_LoraModule)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{module[:200]!r}: {error}", field="--lora-modules", hint=hint) from error
        name, folder = read.name, read.path
    if not folder or not _NAME.fullmatch(name):
        raise ConfigError(f"expected NAME=FOLDER, got {module[:200]!r}", field="--lora-modules", hint=hint)
    return name, folder


class _LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter in the form of vLLM's --lora-modules."""

    name: str
    path: str
    base_model_name: str | None = None
    """Name of the base model; ignored, since a model may have several names: the shapes are compared instead."""


class EngineAdapters:
    """Adapters by name. An unloaded adapter stays on the device until no request uses it."""

    def __init__(self, config: EngineConfig, path: Path | None, *, restarted: bool = False) -> None:
        """Read and check the adapters that are served from the start.

        Raises `ConfigError` or `ModelError`. A restarted engine skips an adapter whose files are missing and rejects
        its requests.
        """
        self._config = config
        self._path = path
        self._named: dict[str, AdapterInfo] = {}
        self._adapters: dict[str, Adapter] = {}
        """By digest, including those that only running requests use."""
        self.leaving = False
        """True if unloaded adapters may still be held."""
        self._users: dict[str, str] = {}
        """Adapter of each request; some of these requests may have ended."""
        for name, folder in lora_modules(config).items():
            try:
                self._serve(name, folder, self._read(folder))
            except ModelError as error:
                if not restarted:
                    raise
                _log.error("the adapter %s is no longer available: %s", name, error)

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """Adapters that requests may select."""
        return tuple(self._named.values())

    @property
    def held(self) -> Collection[Adapter]:
        """Adapters that the runner must hold."""
        return self._adapters.values()

    def reserved_bytes(self, item_bytes: int, first: Parallel) -> int:
        """Return the bytes that adapters use on rank 0, including those that may be loaded later; no rank uses more."""
        count, rank = len(self._adapters), max((adapter.rank for adapter in self.held), default=0)
        if self._config.lora_folder is not None:
            count, rank = self._config.max_loras, self._config.max_lora_rank
        return adapters_bytes(self._spec(), count, rank, item_bytes=item_bytes, parallel=first) if count else 0

    def require(self, digest: str) -> None:
        """Raise `BadRequest` unless an adapter is served."""
        if not any(info.digest == digest for info in self._named.values()):
            raise BadRequest("the adapter of the request is not loaded", field="model")

    def began(self, spec: RequestSpec) -> None:
        """Record the adapter that a request uses."""
        self._users[spec.request_id] = spec.adapter

    def load(self, name: str, folder: Path, hold: Callable[[Collection[Adapter]], None]) -> AdapterInfo:
        """Serve an adapter, which `hold` loads into the runner; nothing changes if it is served by that name already.

        Raises `BadRequest`, or `ModelError` for its files.
        """
        if not _NAME.fullmatch(name):
            raise BadRequest(
                "an adapter name must have 1 to 255 characters, without '=' and new lines", field="lora_name"
            )
        served = self._named.get(name)
        if served is None and len(self._adapters) >= self._config.max_loras:
            raise BadRequest(
                f"the limit of {len(self._adapters)} adapters, loaded or still in use, is reached (--max-loras)",
                field="lora_name",
            )
        adapter = self._read(folder)
        if served is not None:
            if served.digest == adapter.digest:
                return served
            raise BadRequest(
                f"the name {name!r} is already in use by another adapter; unload that first", field="lora_name"
            )
        try:
            hold((self._adapters | {adapter.digest: adapter}).values())
        except MemoryError as error:
            who = f": {error}" if str(error) else ""
            raise BadRequest(f"not enough memory for the adapter{who}", field="lora_path") from error
        return self._serve(name, folder, adapter)

    def unload(self, name: str) -> AdapterInfo:
        """Stop serving an adapter; running requests continue. Raises `BadRequest` if there is none."""
        try:
            info = self._named.pop(name)
        except KeyError:
            raise BadRequest(f"no adapter named {name[:255]!r} is loaded", field="lora_name") from None
        self.leaving = True
        return info

    def sweep(self, living: Iterable[str], hold: Callable[[Collection[Adapter]], None]) -> None:
        """Release adapters that were unloaded and that none of the `living` requests uses."""
        named = {info.digest for info in self._named.values()}
        self._users = {name: self._users[name] for name in living if name in self._users}
        used = named.union(self._users.values())
        if len(used) < len(self._adapters):
            self._adapters = {digest: self._adapters[digest] for digest in used}
            hold(self.held)
        self.leaving = len(named) < len(self._adapters)

    def _read(self, folder: Path) -> Adapter:
        return read_adapter(folder, self._spec().adaptable(), self._config.max_lora_rank)

    def _serve(self, name: str, folder: Path, adapter: Adapter) -> AdapterInfo:
        info = AdapterInfo(name, adapter.digest, str(folder), rank=adapter.rank)
        self._named[name], self._adapters[adapter.digest] = info, adapter
        return info

    def _spec(self) -> DecoderSpec:
        if self._path is None:
            raise ModelError(
                "this model does not support adapters, because it is not loaded from a checkpoint", field="lora_modules"
            )
        with open_checkpoint(self._path) as checkpoint:
            if choose_implementation(checkpoint, self._config.model_impl) == "transformers":
                raise ModelError("a model that transformers computes has no adapters", field="lora_modules")
            return spec_of(checkpoint)
