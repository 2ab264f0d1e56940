"""Profiles by name: a file, a profile that ships with the package or was calibrated here, or DEVICE:MODEL."""

from __future__ import annotations

import dataclasses
import difflib
import re
from importlib import resources
from pathlib import Path
from typing import Final, TypeVar

from fd_core.config.paths import find_cache_dir, user_path
from fd_core.errors import ConfigError
from fd_core.simulation.costs.calculating import ACCELERATORS, ARCHITECTURES, KV_DTYPES, Efficiency, calculated_profile
from fd_core.simulation.costs.profile import CostProfile, parse_profile, read_profile, wrong_profile

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_SUFFIX: Final = ".json"


def profile_named(text: str) -> CostProfile:
    """Return the profile that a text names.

    `smollm2-cpu` ships with the package or was calibrated here, `folder/mine.json` is a file, and
    `h100:llama-70b:tp=8,kv=fp8,bandwidth=0.8` is calculated; its options are tp, kv and the fields of `Efficiency`.
    Raises `ConfigError` that lists the choices.
    """
    if text.endswith(_SUFFIX) or "/" in text:
        return read_profile(user_path(text, "PROFILE"))
    if ":" in text:
        return _calculated(text)
    if _NAME.fullmatch(text) and (own := calibrated_path(text)).is_file():
        return read_profile(own)
    if text in packaged_profiles():
        file = resources.files(__package__) / "profiles" / f"{text}{_SUFFIX}"
        return parse_profile(file.read_bytes(), text)
    own_names = sorted(file.stem for file in calibrated_folder().glob(f"*{_SUFFIX}"))
    named = ", ".join(dict.fromkeys((*own_names, *packaged_profiles()))) or "none"
    raise wrong_profile(
        f"unknown profile {text!r:.80}",
        f"measured: {named}; calculated: DEVICE:MODEL with {', '.join(ACCELERATORS)} and {', '.join(ARCHITECTURES)}, "
        "such as h100:llama-70b:tp=8; or the path of a .json file",
    )


def calibrated_folder() -> Path:
    """Return the folder of the profiles that `fdcore calibrate` writes."""
    return find_cache_dir() / "profiles"


def calibrated_path(name: str) -> Path:
    """Return the path of a calibrated profile. Raises `ConfigError` for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.80} is not a valid profile name", field="--name", hint="use letters, digits, dots, - and _"
        )
    return calibrated_folder() / f"{name}{_SUFFIX}"


def packaged_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that ship with the package, all of them measured."""
    folder = resources.files(__package__) / "profiles"
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in folder.iterdir() if file.name.endswith(_SUFFIX)))


def _calculated(text: str) -> CostProfile:
    device_name, _, rest = text.partition(":")
    model_name, _, options = rest.partition(":")
    device = _look_up(ACCELERATORS, device_name, "device")
    model = _look_up(ARCHITECTURES, model_name, "model")
    shares = dataclasses.asdict(device.efficiency or Efficiency())
    ranks, kv_dtype = 1, "bf16"
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key == "tp":
            ranks = _number(text, key, value, kind=int, low=1, high=1024)
        elif key == "kv":
            if value not in KV_DTYPES:
                raise wrong_profile(f"{text}: expected kv of {' or '.join(KV_DTYPES)}, got {value!r:.40}")
            kv_dtype = value
        elif key in shares:
            shares[key] = _number(text, key, value, kind=float, low=0.01, high=1.0)
        elif key == "pp":
            raise wrong_profile(f"{text}: pipeline parallel sizes are not calculated", "use tp, or calibrate")
        else:
            raise wrong_profile(f"{text}: unknown option {key!r:.40}", f"valid options: tp, kv, {', '.join(shares)}")
    return calculated_profile(text, device, model, ranks=ranks, kv_dtype=kv_dtype, reached=Efficiency(**shares))


def _look_up(table: dict[str, _T], name: str, kind: str) -> _T:
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1)
    hint = f"did you mean {close[0]}? Known: {', '.join(table)}" if close else f"known: {', '.join(table)}"
    raise wrong_profile(f"unknown {kind} {name!r:.40}", hint)


def _number(text: str, key: str, value: str, kind: type[_N], low: _N, high: _N) -> _N:
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise wrong_profile(f"{text}: expected {key} from {low:g} to {high:g}, got {value!r:.40}")
    return number
