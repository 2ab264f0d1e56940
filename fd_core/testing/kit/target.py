"""The backend under test, found as a user would find it, and the engines that tests build on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.backends.contract import Backend
from fd_core.config import EngineConfig, requested_sizes
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError, FdError, PluginError
from fd_core.models.registry import spec_of_config
from fd_core.ops.contract import Ops
from fd_core.plugins import BACKEND, POSTPROCESS, PluginOffer, described, installed_plugins
from fd_core.runner.postprocess.contract import Postprocess, require_fit
from fd_core.testing.kit.law import InvariantViolated
from fd_core.testing.kit.limits import OPTIONAL
from fd_core.testing.kit.requirements import constructed, lacks
from fd_core.testing.models.checkpoints import ENGINE_CASE, PACKED_ENGINE_CASE, write_checkpoint
from fd_core.testing.models.drafting import OracleDrafter, speculation
from fd_core.testing.models.small import SMALL

_MODEST: Final[Mapping[str, Any]] = {**SMALL, "num_threads": 1, "watchdog_seconds": 20.0}
_ISA: Final = "FD_ISA"
_OF_THE_ORACLE: Final = ("kv_cache_dtype", "quantization")
"""Settings that determine the expected texts."""


def parse_target(text: str, folder: Path) -> Target:
    """Return the backend of `NAME` or `NAME:FIELD=VALUE,FIELD=VALUE`; fields are those of `EngineConfig`.

    The instruction set of native kernels may be one of them, as in `cpu:FD_ISA=avx2`, and must be in the environment as
    well. Checkpoints are written below `folder`. Raises `ConfigError` for an unknown field and for an instruction set
    that is not available here.
    """
    target = configured(text, folder)
    isa = environment_of(text).get(_ISA)
    if isa is not None and os.environ.get(_ISA) != isa:
        raise ConfigError(f"{_ISA} is not {isa!r} in the environment", field="BACKEND", hint=f"set {_ISA}={isa}")
    if isa is not None:
        from fd_core.ops.native.build import BuildError, load

        try:
            load()  # a backend would fall back from unavailable kernels
        except BuildError as error:
            raise ConfigError(str(error), field="BACKEND") from error
    return target


def find_target(text: str) -> PluginOffer | None:
    """Find a backend and check its settings without importing it or building kernels. Raises `FdError`.

    Returns None for `auto`, which imports all backends.
    """
    name = configured(text, Path()).name
    return None if name == "auto" else installed_plugins().find(BACKEND, name)


def configured(text: str, folder: Path) -> Target:
    """Return a target whose backend need not exist. Raises `ConfigError` for a setting that does not."""
    settings = {field: value for field, value in _settings_of(text).items() if field != _ISA}
    for field, value in settings.items():
        if not value or field not in EngineConfig.__struct_fields__:
            raise ConfigError(
                f"'{field}={value}' is not a setting",
                field="BACKEND",
                hint="such as cpu:dtype=bfloat16,native_kernels=false",
            )
    return Target(text, text.partition(":")[0], settings, folder=folder)


def environment_of(text: str) -> dict[str, str]:
    """Return the environment variables that a target requires."""
    return {field: value for field, value in _settings_of(text).items() if field == _ISA}


def _settings_of(text: str) -> dict[str, str]:
    parts = filter(None, text.partition(":")[2].split(","))
    return {field: value for field, _, value in (part.partition("=") for part in parts)}


class Target:
    """One backend with settings; makes packs and engines."""

    def __init__(self, text: str, name: str, settings: Mapping[str, str], folder: Path) -> None:
        self.text = text
        """As the user wrote it."""
        self.name = name
        self._settings = settings
        self._folder = folder
        config = self.config()
        self.kv_dtype = config.kv_cache_dtype
        self.quantization = config.quantization
        """Format of the weights after a model is loaded."""
        self.changes = ""
        """Settings of the process that making `ops` changed."""

    def __repr__(self) -> str:
        return self.text

    def config(self, **settings: Any) -> EngineConfig:
        """Return engine settings: of a small engine, overridden by `settings`, then by the user's."""
        values = {"model": "kit", "backend": self.name} | dict(_MODEST) | settings | dict(self._settings)
        try:
            return msgspec.convert(values, EngineConfig, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.text}: {error}", field="BACKEND") from error

    @cached_property
    def cls(self) -> type[Backend]:
        """The class, imported. Raises `PluginError` if it is missing or cannot run here."""
        return installed_plugins().choose_backend(self.name).cls

    @cached_property
    def backend(self) -> Backend:
        """The backend. Raises `PluginError` if it cannot be constructed."""
        return constructed(BACKEND, self.name, lambda: self.cls(self.config()), passes=FdError)

    @cached_property
    def ops(self) -> Ops:
        """One pack, shared by tests that only compute. Raises `PluginError` for an object of another type."""
        from fd_core.testing.hooks.purity import unchanged_process

        backend, made = self.backend, None
        try:
            with unchanged_process(holds=True):
                made = backend.make_ops()
        except InvariantViolated as error:
            self.changes = str(error)
        if not isinstance(made, Ops):
            raise PluginError(f"backend {self.name} cannot be used: make_ops returns {described(made)}")
        return made

    @cached_property
    def implementations(self) -> Mapping[str, Target]:
        """The target with each implementation of attention that is available here, by the name of the setting."""
        found = {"auto": self}
        for name in () if "attention_backend" in self._settings else self.cls.attention_backends:
            text = f"{self.text}{',' if ':' in self.text else ':'}attention_backend={name}"
            each = Target(text, self.name, {**self._settings, "attention_backend": name}, self._folder)
            with suppress(FdError):
                each.backend.make_ops()
                found[name] = each
        return found

    @cached_property
    def postprocess(self) -> type[Postprocess]:
        """Return the postprocessor. Raises `PluginError` if it is missing or does not support this backend."""
        plugins = installed_plugins()
        name = self.config().postprocess or plugins.default_postprocessor(self.name, self.ops.framework)
        found = plugins.load(POSTPROCESS, name)
        require_fit(found, name, self.ops.framework, backend=self.name)
        return found

    @property
    def limits(self) -> Mapping[str, str]:
        pack = type(self.ops)
        lacking = {ability: name for ability, name in OPTIONAL.items() if getattr(pack, name) is getattr(Ops, name)}
        return {ability: f"the pack has no `{name}`" for ability, name in lacking.items()} | dict(self.backend.limits)

    @property
    def emulated(self) -> bool:
        """True if the backend's device is emulated."""
        return bool(getattr(self.backend, "emulated", False))

    def about(self) -> dict[str, Any]:
        """Return the description for its report card."""
        ops = self.ops  # made first: a backend may select its kernels only then
        return {
            "distribution": str(installed_plugins().offered(BACKEND)[self.name].origin),
            "device": self.backend.describe(),
            "dtype": ops.dtype,
            "emulated": self.emulated,
            "limits": dict(self.limits),
            "envelope": self.backend.envelope.limits(),
        }

    @property
    def oracle_name(self) -> str:
        """The reference backend: numpy, or the scripted one for backends without checkpoints."""
        return "reference" if self.cls.needs_checkpoint else "null"

    @cached_property
    def oracle(self) -> Target:
        """The oracle as a target, which stores weights and KV in the same number of bits."""
        kept = {name: value for name, value in self._settings.items() if name in _OF_THE_ORACLE}
        return Target(self.oracle_name, self.oracle_name, kept, folder=self._folder)

    @property
    def right(self) -> tuple[str, ...]:
        """Inputs that determine the expected texts: the oracle and its storage of weights and KV."""
        return self.oracle_name, self.quantization, self.kv_dtype

    @property
    def precision(self) -> str:
        """Key of the applicable margins: the dtype, or `packed` weights, with which activations may have 8 bits."""
        return self.ops.dtype if self.quantization == "auto" or self.ops.dequantizes_weights else "packed"

    @property
    def exact(self) -> bool:
        """True if its texts must equal the oracle's token by token; lower precision may move a logit."""
        return self.precision == "float32" and self.kv_dtype == "auto"

    def changed(self, **settings: str) -> Target:
        """Return the same backend with other settings."""
        text = ",".join(f"{name}={value}" for name, value in settings.items())
        return Target(f"{self.text} with {text}", self.name, {**self._settings, **settings}, folder=self._folder)

    def checkpoint(self, case: str = ENGINE_CASE) -> Path | None:
        """Return the folder of a tiny checkpoint, written at the first call; None for a backend that reads none."""
        if not self.cls.needs_checkpoint:
            return None
        if case == ENGINE_CASE and self.quantization != "auto":
            case = PACKED_ENGINE_CASE
        folder = self._folder / case
        return folder if (folder / "generation_config.json").exists() else write_checkpoint(case, folder)

    def load(self, case: str = ENGINE_CASE, epoch: int = 1, first_step: int = 0, **settings: Any) -> Engine:
        """Load a small engine on the checkpoint of a case; close it after use.

        Skips the running test if the engine is beyond the envelope of the backend.
        """
        config, path = self.config(**settings), self.checkpoint(case)
        if self.cls.envelope.limits():
            cls = self.cls
            sizes = requested_sizes(
                config, cls.default_pipeline_depth, cls.default_batched_tokens, cls.default_num_seqs
            )
            model = {} if path is None else spec_of_config(path).sizes()
            if beyond := self.cls.envelope.exceeded({**sizes, **model}):
                lacks(f"its envelope has {', '.join(f'{name}={limit}' for name, limit in beyond.items())}")
        return load_engine(config, path, epoch=epoch, first_step=first_step, progress=lambda *_: None)

    @contextmanager
    def engine(
        self,
        k: int = 0,
        whole: Sequence[Sequence[int]] = (),
        wrong: float = 0.0,
        case: str = ENGINE_CASE,
        **settings: Any,
    ) -> Iterator[Engine]:
        """Load a small engine on the checkpoint of a case and close it at exit.

        With `k` > 0 up to k drafts are guessed from the `whole` texts, wrong in that share of the tokens. With `k` = 0
        a step computes at most one token per row: grammars, whose forced tokens are drafts, must be enabled explicitly.
        """
        speculative = {"speculative": speculation(k), "structured_output": k > 0, "pipeline_depth": 1}
        engine = self.load(case, **speculative | settings)
        if k and "speculative" not in settings:
            engine.probe().runner.drafter = OracleDrafter(engine.info.max_num_seqs, whole, wrong, seed=0)
        try:
            yield engine
        finally:
            engine.close()
