"""What is known about one request while it is answered, and what it took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fd_core.http.access.keys import ApiKey, KeyAccount, Reservation
from fd_core.http.access.tenants import Tenant


@dataclass(slots=True)
class RequestRecord:
    """Filled in from the gate to the last token; read for headers, the access log and the limits of the key."""

    request_id: str = ""
    key: ApiKey | None = None
    """None where there are no keys, or the path needs none."""
    tenant: Tenant | None = None
    """The key of a router behind this one; None if the client came directly."""
    account: KeyAccount | None = None
    """What the key has taken, while this request counts in it; None for a key without limits."""
    tokens_in: int = 0
    tokens_out: int = 0
    reservation: Reservation | None = None

    @property
    def owner(self) -> str:
        """Whose request it is, see `ApiKey.owner`; "" for anybody's. A tenant has a part of what its router has."""
        own = "" if self.key is None else self.key.owner
        return own if self.tenant is None else f"{own}.{self.tenant.owner}"

    @property
    def is_admin(self) -> bool:
        """Whether it may change what all keys use. Without keys everybody may."""
        return (self.key is None or self.key.admin) and (self.tenant is None or self.tenant.admin)

    def may_abort(self, owner: str) -> bool:
        """Return True if this request may end an owner's work; a router's admin reaches all of that router's."""
        if self.is_admin or owner == self.owner:
            return True
        return self.tenant is not None and self.tenant.admin and owner.startswith(self.owner.partition(".")[0] + ".")

    @property
    def tokens_per_minute(self) -> int | None:
        """The limit of tokens, None if there is none; of a tenant it is the one that its router counts."""
        if self.tenant is not None and self.tenant.tokens_per_minute is not None:
            return self.tenant.tokens_per_minute
        return None if self.account is None else self.account.limits.tokens_per_minute

    def reserve(self, tokens: int) -> None:
        """Take tokens in advance. Raises `LimitReached`."""
        if self.account is not None:
            self.reservation = self.account.reserve(time.monotonic(), tokens)

    def count(self, tokens_in: int, tokens_out: int) -> None:
        """Count tokens that were read and written."""
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out

    def settle(self) -> None:
        """Give back what was reserved and not used."""
        if self.reservation is not None:
            self.reservation.settle(time.monotonic(), self.tokens_in + self.tokens_out)

    def close(self) -> None:
        """Make room for the next request of the key; again without effect."""
        if self.account is not None:
            self.account.running -= 1
            self.account = None
