"""Models on the Hugging Face hub, in the cache shared with its tools."""

from __future__ import annotations

import contextlib
import glob
import threading
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fd_core.errors import ModelError
from fd_core.models.fetching.packaged import ProgressSink, network_reason, report_growth, require_room
from fd_core.models.loading.files import read_json_object

# Top-level safetensors, configuration and tokenizer, and named chat templates: never pickles, never code.
_ALLOWED = ("*.safetensors", "*.json", "*.jinja")
_TEMPLATES = "additional_chat_templates/*.jinja"


def find(name: str, revision: str | None, cache: Path | None) -> Path | None:
    """Return the snapshot folder if it is completely cached, else None; uses no network."""
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
        return folder if _is_whole(folder) else None
    except (OSError, ValueError):
        return None


def fetch(name: str, revision: str | None, cache: Path | None, progress: ProgressSink) -> Path:
    """Download a repository's safetensors, configuration and tokenizer. Raises `ModelError` with the reason of a
    failure."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    # The base class of transport errors differs between versions of the library: requests' or httpx's.
    transport: tuple[Any, ...] = HfHubHTTPError.__bases__
    try:
        wanted = _wanted_files(name, huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True))
        total = sum(wanted.values())
        home = cache or Path(constants.HF_HUB_CACHE)
        require_room(home, total, f"fetching {name}", setting="HF_HOME")
        progress.start(f"download {name}", total)
        ended = threading.Event()
        blobs = home / f"models--{name.replace('/', '--')}" / "blobs"
        watcher = threading.Thread(target=report_growth, args=(blobs, progress, ended.wait), daemon=True)
        watcher.start()
        try:
            patterns = [glob.escape(file) for file in wanted]
            folder = huggingface_hub.snapshot_download(
                name, revision=revision, cache_dir=cache, allow_patterns=patterns, tqdm_class=_silent_bars()
            )
        finally:
            ended.set()
            watcher.join()
            progress.finish()
    except (OSError, ValueError, *transport) as error:
        raise _explained(name, revision, error) from error
    return Path(folder)


def cached(cache: Path | None) -> list[tuple[str, int, Path]]:
    """Return name, size in bytes and folder of each cached repository that is readable and holds a complete model."""
    import huggingface_hub
    from huggingface_hub import constants

    home = cache or Path(constants.HF_HUB_CACHE)
    try:
        repositories = huggingface_hub.scan_cache_dir(home).repos if home.is_dir() else frozenset()
    except OSError:
        return []
    found = []
    for repository in repositories:
        revisions = sorted(repository.revisions, key=lambda each: each.last_modified, reverse=True)
        whole = next((each for each in revisions if _is_whole(each.snapshot_path)), None)
        if repository.repo_type == "model" and whole is not None:
            found.append((repository.repo_id, whole.size_on_disk, whole.snapshot_path))
    return sorted(found)


def _wanted_files(name: str, info: Any) -> dict[str, int]:
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
    wanted = {file: size for file, size in sizes.items() if _is_wanted(file)}
    if not any(file.endswith(".safetensors") for file in wanted):
        found = ", ".join(sorted(file for file in sizes if file.endswith((".bin", ".pt", ".pth", ".gguf")))[:5])
        raise ModelError(
            f"{name} on Hugging Face has no safetensors; weights found: {found or 'none'}",
            hint="download a .gguf file and pass its path, or choose a repository with safetensors",
        )
    return wanted


def _is_wanted(file: str) -> bool:
    if "/" in file:
        return fnmatch(file, _TEMPLATES) and file.count("/") == 1
    return any(fnmatch(file, each) for each in _ALLOWED) and not fnmatch(file, "consolidated*.safetensors")


def _is_whole(folder: Path) -> bool:
    """Return True if all files of the snapshot are there; a partial one lacks the links of missing files."""
    with contextlib.suppress(OSError, ModelError):
        if not (folder / "config.json").is_file():
            return False
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json_object(index).get("weight_map")
            shards = set(weight_map.values()) if isinstance(weight_map, dict) else {""}
            return all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards)
        return any(folder.glob("*.safetensors"))
    return False


def _silent_bars() -> type[Any]:
    """Return a progress bar that draws nothing and reports to the sink."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm

    def silenced(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **{**kwargs, "disable": True})

    return type("SilentBar", (base,), {"__init__": silenced})


def _explained(name: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    local = "use a local folder, a .gguf file or smollm2"
    hint = local
    if isinstance(error, GatedRepoError):
        reason = "it is gated"
        hint = "accept its terms on its page and set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "the repository does not exist or is private"
    elif isinstance(error, RevisionNotFoundError):
        reason = f"it has no revision {revision!r}"
    elif isinstance(error, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
        hint = f"unset it, or {local}"
    else:
        reason = network_reason((str(error).strip().splitlines() or [type(error).__name__])[0])
        hint = f"check the network and HTTPS_PROXY; set HF_ENDPOINT for a mirror; {local}"
    host = urlsplit(constants.ENDPOINT).netloc
    message = f"{name!r} is neither a local folder nor cached, and {host} cannot provide it: {reason}"
    return ModelError(message, hint=hint)
