"""Open a checkpoint of any format: a folder with safetensors, or a .gguf file of an installed family."""

from __future__ import annotations

from pathlib import Path

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.files import PICKLE_HINT, PICKLE_SUFFIXES


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with safetensors, config and tokenizer, or a .gguf file, which may be the first part of several.

    A folder without safetensors and with exactly one .gguf file, or the parts of one, opens that file.
    Raises `ModelError` otherwise, and for pickled weights and damaged files.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(f"model path does not exist: {path}")
    if path.is_dir():
        return _open_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        from fd_core.models.families.installed import installed_families
        from fd_core.models.loading.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path, installed_families().gguf)
    if suffix in PICKLE_SUFFIXES:
        raise ModelError(f"refused to open pickled weights: {path}", hint=PICKLE_HINT)
    if suffix == ".safetensors":
        raise ModelError(f"{path} contains only weights", hint="use the folder with config.json and tokenizer.json")
    raise ModelError(f"not a model: {path}", hint="use a folder with safetensors, or a .gguf file")


def _open_folder(folder: Path) -> Checkpoint:
    files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    if any(entry.suffix == ".safetensors" or entry.name.endswith(".safetensors.index.json") for entry in files):
        from fd_core.models.loading.safetensors_files import SafetensorsCheckpoint

        return SafetensorsCheckpoint(folder)
    ggufs = [entry for entry in files if entry.suffix.lower() == ".gguf"]
    if len(ggufs) > 1:
        from fd_core.models.loading.gguf_checkpoint import is_later_part

        ggufs = [entry for entry in ggufs if not is_later_part(entry.name)] or ggufs
    if len(ggufs) == 1:
        return open_checkpoint(ggufs[0])
    if ggufs:
        names = ", ".join(entry.name for entry in ggufs)
        raise ModelError(f"{folder} holds several GGUF files: {names}", hint="use the path of one of them")
    pickles = [entry.name for entry in files if entry.suffix.lower() in PICKLE_SUFFIXES]
    if pickles:
        raise ModelError(f"{folder} holds only pickled weights: {', '.join(pickles[:5])}", hint=PICKLE_HINT)
    raise ModelError(f"no weights in {folder}", hint="a model folder holds *.safetensors and config.json")
