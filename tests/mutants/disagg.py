"""Faults against section 6 of the protocol: who owns leased blocks, until when, and what may be computed on them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

LEASE = "disagg/lease.py"
DECODE = "disagg/decode/lease.py"
PREFILL = "disagg/prefill/lease.py"
COMPATIBILITY = "disagg/kv_compatibility.py"
TICKET = "disagg/ticket.py"

_LATE = "6.2: late writes to an expired lease are refused"
_ONCE = "6.2: duplicates are no-ops"
_COMMIT = "6.2: the decode side starts after a commit that covers everything, with digest"
_EXPIRES = "6.1: every lease expires"
_ABORT = "6.1: an abort on either side ends it on both"
_WINDOW = "6: never more than a window of pieces is on its way without credit"
_TIME = "6: a lost message that is not a piece costs only time"
_FITS = "6: sides that do not fit together are refused at the handshake"
_TICKET = "6: clients cannot send a worker to an address of their choice"

_EXPIRY = '        if late := self._clock.expiry_reason(now):\n            return self._break("expired", late)\n'
_NOT_TAKEN = "index not in self._taking:\n            return []\n        self._taking.remove"
_TOLD = "return [SendMessage(AbortLease(self._name, reason)), *self._end("

MUTANTS = (
    mutant(
        "a-late-piece-is-taken",
        _LATE,
        (
            DECODE,
            "            return []\n        self._peer_seen = True\n",
            "            pass\n        self._peer_seen = True\n",
        ),
    ),
    mutant(
        "a-late-copy-is-credited",
        _LATE,
        (DECODE, f"if self.outcome is not None or {_NOT_TAKEN}", f"if {_NOT_TAKEN}"),
    ),
    mutant("a-piece-is-taken-twice-at-a-time", _ONCE, (DECODE, "index in self._taking or index in", "index in")),
    mutant("a-copied-piece-is-taken-again", _ONCE, (DECODE, " or index in self._copied:", ":")),
    mutant(
        "a-block-is-sent-twice", _ONCE, (PREFILL, "            if index not in self._seen:\n", "            if True:\n")
    ),
    mutant("a-foreign-piece-is-taken", _LATE, (DECODE, "index not in self._pieces or ", "")),
    mutant(
        "decoding-starts-before-all-pieces",
        _COMMIT,
        (DECODE, "self._commit is None or len(self._copied) < len(self._pieces)", "self._commit is None"),
    ),
    mutant("a-commit-before-all-pieces", _COMMIT, (PREFILL, " or len(self._sent) < len(self._pieces):", ":")),
    mutant(
        "a-commit-is-not-checked",
        _COMMIT,
        (DECODE, "if commit_digest(self._copied) != self._commit.digest:", "if not self._commit.digest:"),
    ),
    mutant(
        "a-commit-is-of-a-set-of-pieces",
        _COMMIT,
        (LEASE, 'total.update(index.to_bytes(4, "little") + digests[index])', "total.update(digests[index])"),
    ),
    mutant("a-commit-is-in-order-of-arrival", _COMMIT, (LEASE, "in sorted(digests)", "in digests")),
    mutant("a-part-of-the-prompt-is-enough", _COMMIT, (DECODE, "if commit.tokens != self._tokens:", "if False:")),
    mutant(
        "a-spoiled-piece-is-forgotten",
        _COMMIT,
        (
            DECODE,
            'return self._break("damaged", f"piece {index}: {reason}")',
            "self._taking.remove(index)\n        return []",
        ),
    ),
    mutant(
        "half-a-prompt-is-waited-for",
        _EXPIRES,
        (PREFILL, "        if len(self._seen) < len(self._pieces):\n", "        if not self._seen:\n"),
    ),
    mutant("the-decode-side-does-not-expire", _EXPIRES, (DECODE, _EXPIRY, "")),
    mutant("the-prefill-side-does-not-expire", _EXPIRES, (PREFILL, _EXPIRY, "")),
    mutant(
        "a-lease-lasts-as-long-as-it-is-talked-about",
        _EXPIRES,
        (LEASE, "        if now >= self._end:\n", "        if now >= self._end + 1e6:\n"),
    ),
    mutant(
        "a-lost-piece-is-waited-for", _EXPIRES, (PREFILL, "        if now >= self._stuck:\n", "        if False:\n")
    ),
    mutant(
        "a-dead-engine-is-alive",
        _EXPIRES,
        (PREFILL, "if working or self._final is not None:", "if True:"),
    ),
    mutant(
        "a-slow-engine-expires",
        "6: a lease lasts as long as the engine works",
        (
            DECODE,
            "        self._clock.received(now)\n",
            "        if isinstance(message, KVPiece):\n            self._clock.received(now)\n",
        ),
    ),
    mutant("the-decode-side-aborts-silently", _ABORT, (DECODE, _TOLD, "return [*self._end(")),
    mutant(
        "the-prefill-side-aborts-silently",
        _ABORT,
        (PREFILL, _TOLD.replace("Abort", "messages.Abort"), "return [*self._end("),
    ),
    mutant(
        "the-prefill-side-ignores-an-abort",
        _ABORT,
        (PREFILL, 'return self._end("aborted", reason or "the decode worker aborted the lease")', "return []"),
    ),
    mutant(
        "the-decode-side-ignores-an-abort",
        _ABORT,
        (DECODE, 'return self._end("lost", reason or "the prefill worker aborted the lease")', "return []"),
    ),
    mutant(
        "the-request-goes-on-without-its-lease",
        _ABORT,
        (PREFILL, "abort and self._final is None)", "abort and self._final is not None)"),
    ),
    mutant(
        "a-lease-ends-twice",
        "6.1: a lease has exactly one owner",
        (
            PREFILL,
            'return [] if self.ended is not None else self._break("failed", reason)',
            'return self._break("failed", reason)',
        ),
    ),
    mutant("the-window-is-ignored", _WINDOW, (PREFILL, " - self._credited < self._opening.window", " > -1")),
    mutant("the-window-holds-one-more", _WINDOW, (PREFILL, "_credited < self._opening", "_credited <= self._opening")),
    mutant("credit-adds-up", _WINDOW, (PREFILL, "self._credited = credited", "self._credited += credited")),
    mutant("credit-is-taken-on-trust", _WINDOW, (PREFILL, "min(taken, len(self._sent))", "taken")),
    mutant(
        "credit-is-given-before-the-copy",
        _WINDOW,
        (DECODE, "name, len(self._copied)))]", "name, len(self._copied) + len(self._taking)))]"),
    ),
    mutant(
        "a-flood-of-pieces-is-taken",
        _WINDOW,
        (DECODE, "len(self._taking) >= self._opening.window", "len(self._taking) > 2**31"),
    ),
    mutant(
        "lost-credit-stays-lost",
        _TIME,
        (DECODE, "        if self._copied:\n            return self._credit(now)\n", ""),
    ),
    mutant(
        "a-lost-opening-stays-lost",
        _TIME,
        (
            DECODE,
            "SendMessage(Heartbeat(self._name) if self._peer_seen else self._opening)",
            "SendMessage(Heartbeat(self._name))",
        ),
    ),
    mutant(
        "a-lost-commit-stays-lost",
        _TIME,
        (PREFILL, "        if commit := self._commit(now):\n            return commit\n", ""),
    ),
    mutant("any-size-of-heads-fits", _FITS, (COMPATIBILITY, '    "head_dim": "the size of a head",\n', "")),
    mutant(
        "any-silence-will-do",
        _FITS,
        (LEASE, "if not _MIN_IDLE_TIMEOUT <= opening.idle_timeout <= _MAX_IDLE_TIMEOUT:", "if False:"),
    ),
    mutant("a-ticket-is-good-for-any-request", _TICKET, (TICKET, "+ name + place", "+ place")),
    mutant("a-ticket-is-good-for-any-address", _TICKET, (TICKET, "+ name + place", "+ name")),
    mutant(
        "request-and-address-run-into-each-other",
        _TICKET,
        (TICKET, 'len(name).to_bytes(8, "little") + name + place', "name + place"),
    ),
    mutant("a-ticket-needs-no-signature", _TICKET, (TICKET, "if genuine and 1 <=", "if 1 <=")),
)
