"""Faults against section 6 of the protocol: owners and lifetime of leased blocks, and when decoding may start."""

from __future__ import annotations

from tests.mutants.mutant import mutant

LEASE = "disagg/lease.py"
DECODE = "disagg/decode/lease.py"
PREFILL = "disagg/prefill/lease.py"
COMPATIBILITY = "disagg/kv_compatibility.py"
SENDER = "disagg/prefill/sender.py"
TICKET = "disagg/ticket.py"
TRANSFER = "disagg/transfer.py"

_LATE = "6.2: late writes to an expired lease are rejected"
_ONCE = "6.2: duplicates are no-ops"
_COMMIT = "6.2: decoding starts after a commit that covers all blocks, with digest"
_EXPIRES = "6.1: every lease expires"
_ABORT = "6.1: an abort by either worker ends the lease on both"
_WINDOW = "6: at most one window of pieces is in flight without credit"
_TIME = "6: losing a message other than a piece costs only time"
_FITS = "6: incompatible workers are rejected at the handshake"
_TICKET = "6: clients cannot choose the address that a worker connects to"

_EXPIRY = '        if late := self._clock.expiry_reason(now):\n            return self._break("expired", late)\n'
_NOT_TAKEN = "index not in self._taking:\n            return []\n        self._taking.remove"
_SENDS_ABORT = "return [SendMessage(AbortLease(self._name, reason)), *self._end("

MUTANTS = (
    mutant(
        "late-piece-is-accepted",
        _LATE,
        (
            DECODE,
            "            return []\n        self._peer_seen = True\n",
            "            pass\n        self._peer_seen = True\n",
        ),
    ),
    mutant(
        "late-copy-is-credited",
        _LATE,
        (DECODE, f"if self.outcome is not None or {_NOT_TAKEN}", f"if {_NOT_TAKEN}"),
    ),
    mutant("piece-is-accepted-twice-during-its-copy", _ONCE, (DECODE, "index in self._taking or index in", "index in")),
    mutant("copied-piece-is-accepted-again", _ONCE, (DECODE, " or index in self._copied:", ":")),
    mutant(
        "block-is-sent-twice", _ONCE, (PREFILL, "            if index not in self._seen:\n", "            if True:\n")
    ),
    mutant("foreign-piece-is-accepted", _LATE, (DECODE, "index not in self._pieces or ", "")),
    mutant(
        "decoding-starts-before-all-pieces",
        _COMMIT,
        (DECODE, "self._commit is None or len(self._copied) < len(self._pieces)", "self._commit is None"),
    ),
    mutant("commit-before-all-pieces", _COMMIT, (PREFILL, " or len(self._sent) < len(self._pieces):", ":")),
    mutant(
        "commit-digest-is-not-checked",
        _COMMIT,
        (DECODE, "if commit_digest(self._copied) != self._commit.digest:", "if not self._commit.digest:"),
    ),
    mutant(
        "commit-digest-ignores-the-order-of-pieces",
        _COMMIT,
        (LEASE, 'total.update(index.to_bytes(4, "little") + digests[index])', "total.update(digests[index])"),
    ),
    mutant("commit-digest-uses-the-order-of-arrival", _COMMIT, (LEASE, "in sorted(digests)", "in digests")),
    mutant("partial-prompt-counts-as-complete", _COMMIT, (DECODE, "if commit.tokens != self._tokens:", "if False:")),
    mutant(
        "damaged-piece-is-ignored",
        _COMMIT,
        (
            DECODE,
            'return self._break("damaged", f"piece {index}: {reason}")',
            "self._taking.remove(index)\n        return []",
        ),
    ),
    mutant(
        "partial-prompt-is-awaited",
        _EXPIRES,
        (PREFILL, "        if len(self._seen) < len(self._pieces):\n", "        if not self._seen:\n"),
    ),
    mutant("decode-lease-does-not-expire", _EXPIRES, (DECODE, _EXPIRY, "")),
    mutant("prefill-lease-does-not-expire", _EXPIRES, (PREFILL, _EXPIRY, "")),
    mutant(
        "any-message-renews-the-lease",
        _EXPIRES,
        (LEASE, "        if now >= self._end:\n", "        if now >= self._end + 1e6:\n"),
    ),
    mutant("lost-piece-is-awaited", _EXPIRES, (PREFILL, "        if now >= self._stuck:\n", "        if False:\n")),
    mutant(
        "dead-engine-sends-heartbeats",
        _EXPIRES,
        (PREFILL, "if working or self._final is not None:", "if True:"),
    ),
    mutant(
        "slow-engine-expires",
        "6: a lease lasts as long as the engine works",
        (
            DECODE,
            "        self._clock.received(now)\n",
            "        if isinstance(message, KVPiece):\n            self._clock.received(now)\n",
        ),
    ),
    mutant("decode-worker-aborts-silently", _ABORT, (DECODE, _SENDS_ABORT, "return [*self._end(")),
    mutant(
        "prefill-worker-aborts-silently",
        _ABORT,
        (PREFILL, _SENDS_ABORT.replace("Abort", "messages.Abort"), "return [*self._end("),
    ),
    mutant(
        "prefill-worker-ignores-an-abort",
        _ABORT,
        (PREFILL, 'return self._end("aborted", reason or "the decode worker aborted the lease")', "return []"),
    ),
    mutant(
        "decode-worker-ignores-an-abort",
        _ABORT,
        (DECODE, 'return self._end("lost", reason or "the prefill worker aborted the lease")', "return []"),
    ),
    mutant(
        "request-continues-without-its-lease",
        _ABORT,
        (PREFILL, "abort and self._final is None)", "abort and self._final is not None)"),
    ),
    mutant(
        "lease-ends-twice",
        "6.1: a lease has exactly one owner",
        (
            PREFILL,
            'return [] if self.ended is not None else self._break("failed", reason)',
            'return self._break("failed", reason)',
        ),
    ),
    mutant("window-is-ignored", _WINDOW, (PREFILL, " - self._credited < self._opening.window", " > -1")),
    mutant("window-is-one-too-large", _WINDOW, (PREFILL, "_credited < self._opening", "_credited <= self._opening")),
    mutant("credit-adds-up", _WINDOW, (PREFILL, "self._credited = credited", "self._credited += credited")),
    mutant("credit-is-taken-on-trust", _WINDOW, (PREFILL, "min(taken, len(self._sent))", "taken")),
    mutant(
        "credit-is-granted-before-the-copy",
        _WINDOW,
        (DECODE, "name, len(self._copied)))]", "name, len(self._copied) + len(self._taking)))]"),
    ),
    mutant(
        "pieces-beyond-the-window-are-accepted",
        _WINDOW,
        (DECODE, "len(self._taking) >= self._opening.window", "len(self._taking) > 2**31"),
    ),
    mutant(
        "lost-credit-is-not-resent",
        _TIME,
        (DECODE, "        if self._copied:\n            return self._credit(now)\n", ""),
    ),
    mutant(
        "lost-open-is-not-resent",
        _TIME,
        (
            DECODE,
            "SendMessage(Heartbeat(self._name) if self._peer_seen else self._opening)",
            "SendMessage(Heartbeat(self._name))",
        ),
    ),
    mutant(
        "lost-commit-is-not-resent",
        _TIME,
        (PREFILL, "        if commit := self._commit(now):\n            return commit\n", ""),
    ),
    mutant("head-size-is-not-compared", _FITS, (COMPATIBILITY, '    "head_dim": "the size of a head",\n', "")),
    mutant(
        "lease-silence-limits-are-not-checked",
        _FITS,
        (LEASE, "if not _MIN_IDLE_TIMEOUT <= opening.idle_timeout <= _MAX_IDLE_TIMEOUT:", "if False:"),
    ),
    mutant("ticket-is-valid-for-any-request", _TICKET, (TICKET, "+ name + place", "+ place")),
    mutant("ticket-is-valid-for-any-address", _TICKET, (TICKET, "+ name + place", "+ name")),
    mutant(
        "ticket-signature-joins-request-and-address",
        _TICKET,
        (TICKET, 'len(name).to_bytes(8, "little") + name + place', "name + place"),
    ),
    mutant("unsigned-ticket-is-accepted", _TICKET, (TICKET, "if genuine and 1 <=", "if 1 <=")),
    mutant(
        "lease-survives-an-update-of-weights",
        _FITS,
        (
            SENDER,
            "list(self._leases.values()):\n            self._act(lease, lease.machine.failed(effect",
            "():\n            self._act(lease, lease.machine.failed(effect",
        ),
    ),
    mutant(
        "version-of-weights-is-not-compared",
        _FITS,
        (TRANSFER, "        if effect.weights:\n", "        if False:\n"),
    ),
    mutant(
        "paused-prefill-worker-accepts-leases",
        _EXPIRES,
        (SENDER, "        self._refusal = effect.refusal\n", ""),
    ),
)
