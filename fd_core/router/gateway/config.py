"""Settings of the gateway: addresses, keys, workers and timeouts."""

from __future__ import annotations

from typing import Annotated, Final

from fd_core.config import ListenConfig
from fd_core.config.constraints import Range
from fd_core.router.workers import ROLES, Role

_DAY: Final = 86400


class GatewayConfig(ListenConfig, frozen=True, kw_only=True):
    """Settings of `fdcore route` beside those of the router itself.

    API keys of clients are not passed on. Without any, keys that clients send go on to the workers.
    """

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
    worker_ca_certs: str | None = None
    """Authorities that certificates of workers may come from; None takes those of the system."""
    tokenizer: str | None = None
    """Model whose tokenizer the workers use; None asks a worker which model it serves."""
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Range(0, 65535)] = 8081
    router_secret: str = ""
    """Secret that workers have to send to register; if it is empty no worker can."""
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
