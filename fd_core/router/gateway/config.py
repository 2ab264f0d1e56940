"""Settings of the gateway: addresses, keys, workers and timeouts."""

from __future__ import annotations

from typing import Annotated, Final

from fd_core.config import LOG_LEVELS
from fd_core.constraints import ByteSize, CheckedStruct, Range
from fd_core.router.workers import ROLES, Role

__all__ = ["GatewayConfig"]

_DAY: Final = 86400


class GatewayConfig(CheckedStruct, frozen=True, kw_only=True):
    """Settings of `fdcore route` beside those of the router itself."""

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    api_keys: tuple[str, ...] = ()
    """API keys of clients, which are not passed on. Without any, keys that clients send go on to the workers."""
    drain_delay: Annotated[float, Range(0, _DAY)] = 0.0
    """Seconds after Ctrl-C or SIGTERM for which requests are still taken while /ready already answers 503."""
    drain_seconds: Annotated[float, Range(0, _DAY)] = 30.0
    """Seconds that running requests get to finish after Ctrl-C."""
    log_level: Annotated[str, LOG_LEVELS] = "info"
    workers: tuple[str, ...] = ()
    """Addresses of mixed workers."""
    prefill: tuple[str, ...] = ()
    """Addresses of prefill workers."""
    decode: tuple[str, ...] = ()
    """Addresses of decode workers."""
    transfer_secret_file: str | None = None
    """File with the secret that prefill and decode workers share with the router; None takes the user's own."""
    worker_api_keys: tuple[str, ...] = ()
    """API keys of the workers; the first one is sent."""
    tokenizer: str | None = None
    """Model whose tokenizer the workers use; None asks a worker which model it serves."""
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Range(0, 65535)] = 8081
    router_secret: str = ""
    """Secret that workers have to send to register; if it is empty no worker can."""
    max_body_bytes: Annotated[int, ByteSize()] = 16 * 1024 * 1024
    """Largest body of a request, in bytes."""
    connect_seconds: Annotated[float, Range(0, _DAY, above=True)] = 3.0
    """Seconds within which a connection to a worker has to be made."""
    read_seconds: Annotated[float, Range(0, _DAY, above=True)] = 600.0
    """Seconds for which a worker may be silent within one request."""
    unreachable_seconds: Annotated[float, Range(0, _DAY, above=True)] = 20.0
    """Seconds for which a worker may be silent within an answer while no health check reaches it."""

    @property
    def by_role(self) -> dict[Role, tuple[str, ...]]:
        """Addresses of the workers in these settings, by role."""
        return {"mixed": self.workers, "prefill": self.prefill, "decode": self.decode}

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the workers in these settings; every role if workers may register."""
        return tuple(role for role in ROLES if self.router_secret or self.by_role[role])
