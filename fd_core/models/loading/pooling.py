"""What a checkpoint says of the vectors that it makes of texts, in the files of sentence-transformers or its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from fd_core.errors import ModelError
from fd_core.models.loading.files import read_json_object, read_limited

_MODES: Final[dict[str, Literal["last", "mean"]]] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}


class VectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes one vector of a text."""

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    """Whether vectors are brought to length 1."""
    judge: tuple[str, str] | None = None
    """Tokens that say no and yes, for a model that judges how well a document answers a query."""


def read_vector_settings(path: Path | None) -> VectorSettings:
    """Read them from a model's folder; anything else has the default.

    Raises `ModelError` for modules of sentence-transformers that are not served.
    """
    if path is None or not path.is_dir():
        return VectorSettings()
    config = read_json_object(path / "config.json") if (path / "config.json").is_file() else {}
    judge = config.get("classifier_from_token")
    if judge is not None and not (
        isinstance(judge, list) and len(judge) == 2 and all(isinstance(each, str) for each in judge)
    ):
        raise ModelError(f"{path}/config.json: classifier_from_token must be two tokens: no and yes")
    said = tuple(judge) if judge is not None else None
    modules = path / "modules.json"
    if not modules.is_file():
        return VectorSettings(judge=said)
    pooling: Literal["last", "mean"] | None = None
    normalize = False
    try:
        listed = msgspec.json.decode(read_limited(modules), type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{modules} is not a list of modules: {error}") from error
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(path / str(module.get("path", "")).replace("\0", "?") / "config.json", path)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(
                f"{modules}: the module {kind[:40]!r} is not served",
                hint="served are Transformer, Pooling and Normalize",
            )
    if pooling is None:
        raise ModelError(f"{modules} names no module for pooling")
    return VectorSettings(pooling=pooling, normalize=normalize, judge=said)


def _pooling(file: Path, folder: Path) -> Literal["last", "mean"]:
    if folder.resolve() not in file.resolve().parents:
        raise ModelError(f"{folder}/modules.json names a folder outside the model's")
    settings: dict[str, Any] = read_json_object(file)
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, on in settings.items() if name.startswith(prefix) and on is True]
    if isinstance(named := settings.get("pooling_mode"), str):
        modes = [named]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{file}: pooling by {' and '.join(modes) or 'nothing'} is not served",
            hint="served are the last token and the mean",
        )
    return _MODES[modes[0]]
