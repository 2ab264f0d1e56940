"""Import of NIXL on first use, and its settings from the environment: transports, devices and memory."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fd_core.errors import ConfigError, PluginError

_CHOICE: Final = re.compile(r"\^?[A-Za-z0-9_.:*-]+(,[A-Za-z0-9_.:*-]+)*")
_DEFAULT_MB: Final = 4096
_TRUST: Final = "FD_NIXL_TRUST_NETWORK"
_MEMORY: Final = "FD_NIXL_MEMORY_MB"
_MOST_MB: Final = 1 << 20


class Settings(NamedTuple):
    """Start options of NIXL, and the limit of its memory."""

    transports: str = "tcp"
    """Transports of UCX."""
    devices: str = "lo"
    """Network devices of UCX, which listens on each of them."""
    memory: int = _DEFAULT_MB << 20
    """Limit in bytes for the values of all leases of this process."""

    @property
    def engine_config(self) -> str:
        """Settings that NIXL passes to UCX: one word per variable, so set lists in UCX's own variables."""
        pairs = (("TLS", self.transports), ("NET_DEVICES", self.devices))
        return ",".join(f"{name}={value}" for name, value in pairs if "," not in value)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings from the environment.

    Raises `ConfigError` without consent to an unauthenticated port, for invalid values, and for conflicting variables
    of UCX: they would take precedence, and might allow writes from another network into this process.
    """
    if environment.get(_TRUST) != "yes":
        raise ConfigError(
            "NIXL opens an unauthenticated port: every peer that connects can modify all memory of this process",
            field=_TRUST,
            hint=f"set {_TRUST}=yes if only trusted processes can connect, or use --kv-connector tcp",
        )
    transports = _chosen(environment, "FD_NIXL_TLS", "UCX_TLS", default=Settings().transports)
    devices = _chosen(environment, "FD_NIXL_NET_DEVICES", "UCX_NET_DEVICES", default=Settings().devices)
    megabytes = environment.get(_MEMORY, str(_DEFAULT_MB))
    if not (megabytes.isascii() and megabytes.isdigit() and 1 <= int(megabytes[:9]) <= _MOST_MB):
        raise ConfigError(f"{_MEMORY} is not a number of MiB from 1 to {_MOST_MB:,}", field=_MEMORY)
    return Settings(transports, devices, int(megabytes) << 20)


def _chosen(environment: Mapping[str, str], name: str, of_ucx: str, default: str) -> str:
    chosen = environment.get(name, default)
    if not _CHOICE.fullmatch(chosen):
        raise ConfigError(
            f"{name} is not a comma-separated list of words", field=name, hint=f"for example {name}={default}"
        )
    its_own = environment.get(of_ucx)
    if its_own is None and "," in chosen:
        raise ConfigError(
            f"{name} is a list, which NIXL cannot pass to UCX", field=name, hint=f"set {of_ucx}={chosen} as well"
        )
    if its_own is not None and its_own != chosen:
        raise ConfigError(
            f"{of_ucx} is set and would override {name}={chosen}",
            field=of_ucx,
            hint=f"unset {of_ucx}, or set {name} to the same value",
        )
    return chosen


_MODULES: Final = ("nixl_cu13", "nixl_cu12")
"""The distribution `nixl` contains both and selects one by the CUDA version; both support host memory."""
_NEEDED: Final = ("nixl_agent", "nixl_agent_config", "nixl_thread_sync_t")
_TRIED: Final = "1.5"


class Library(NamedTuple):
    """An imported NIXL."""

    api: Any
    errors: tuple[type[Exception], ...]
    """Types of the exceptions that its calls raise."""


def load_library() -> Library:
    """Import NIXL. Raises `PluginError` if it is not installed, or not usable here."""
    name = next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)
    if name is None:
        raise PluginError(
            "the connector nixl needs NIXL, which is not installed",
            field="--kv-connector",
            hint="pip install 'nixl-cu13>=1.5.1,<1.6', or use --kv-connector tcp",
        )
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read on import; the default logs to stdout
    raising = logging.raiseExceptions
    try:
        api = importlib.import_module(name)
        bindings = importlib.import_module(f"{name}._bindings")
    except (ImportError, OSError) as error:
        raise PluginError(
            f"NIXL ({name}) cannot be imported: {error}",
            field="--kv-connector",
            hint="repair its installation, or use --kv-connector tcp",
        ) from error
    finally:
        logging.raiseExceptions = raising  # the import disables it for the whole process
    missing = [needed for needed in _NEEDED if not hasattr(api, needed)]
    if missing:
        raise PluginError(
            f"NIXL ({name}) has no {missing[0]}", field="--kv-connector", hint=f"install version {_TRIED}"
        )
    raised = (getattr(bindings, name) for name in dir(bindings))
    own = tuple(one for one in raised if isinstance(one, type) and issubclass(one, Exception))
    return Library(api, (*own, RuntimeError, ValueError))
