"""GGUF files that were split into parts, of which the first has the metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.errors import ModelError
from fd_core.models.opening import open_checkpoint
from tests.models.loading.tiny_gguf import LLAMA, llama_tensors, write_gguf

COUNT = 3


def _write(folder: Path, *, first: int = 4, changes: dict[int, dict[str, Any]] | None = None) -> Path:
    """Write a model in parts, the first with so many tensors, and return the path of that part."""
    names = list(llama_tensors())
    shares = [names[:first], names[first:7], names[7:]]
    for number, share in enumerate(shares):
        extra = {"split.no": number, "split.count": COUNT, "split.tensors.count": len(names)}
        write_gguf(
            folder / f"m-{number + 1:05d}-of-{COUNT:05d}.gguf",
            values=LLAMA if number == 0 else {},
            tensors={name: llama_tensors()[name] for name in share},
            extra=extra | (changes or {}).get(number, {}),
        )
    return folder / f"m-00001-of-{COUNT:05d}.gguf"


@pytest.mark.parametrize("first", [4, 0], ids=["tensors-in-each", "metadata-alone-first"])
def test_parts_are_the_model_of_the_whole_file(tmp_path: Path, first: int) -> None:
    (tmp_path / "whole").mkdir()
    path, whole = _write(tmp_path, first=first), write_gguf(tmp_path / "whole" / "m.gguf")
    with open_checkpoint(path) as split, open_checkpoint(whole) as expected:
        assert split.config == expected.config and set(split.names()) == set(expected.names())
        assert split.total_bytes == expected.total_bytes
        for name in expected.names():
            np.testing.assert_array_equal(split.read(name).data, expected.read(name).data)
        digest = split.digest
    with open_checkpoint(tmp_path) as folder:
        assert folder.path == path and folder.digest == digest
    changed = bytearray((last := path.with_name("m-00003-of-00003.gguf")).read_bytes())
    changed[-1] ^= 1
    last.write_bytes(changed)
    assert open_checkpoint(path).digest != digest


def test_missing_part_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*m-00002-of-00003\.gguf: No such file"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("opened", "renamed"),
    [("m-00002-of-00003.gguf", None), ("other.gguf", "other.gguf"), ("m-00001-of-00004.gguf", "m-00001-of-00004.gguf")],
)
def test_part_that_is_not_named_as_the_first_is_refused(tmp_path: Path, opened: str, renamed: str | None) -> None:
    path = _write(tmp_path)
    if renamed:
        path.rename(tmp_path / renamed)
    with pytest.raises(ModelError, match=r"not named and numbered as the first of 3 \(use the path of the part NAME"):
        open_checkpoint(tmp_path / opened)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"split.no": 2}}, r"m-00002-of-00003\.gguf is not part 2 of 3"),
        ({2: {"split.count": 4}}, r"m-00003-of-00003\.gguf is not part 3 of 3"),
        ({0: {"split.tensors.count": 12}}, r"m-00001-of-00003\.gguf and its other parts have 11 tensors, expected 12"),
    ],
)
def test_parts_of_different_files_are_refused(tmp_path: Path, changes: dict[int, dict[str, Any]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(_write(tmp_path, changes=changes))


def test_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path)
    tensors = {name: llama_tensors()[name] for name in ("output_norm.weight", "token_embd.weight")}
    write_gguf(
        path.with_name("m-00003-of-00003.gguf"), values={}, tensors=tensors, extra={"split.no": 2, "split.count": 3}
    )
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf: tensor 'token_embd\.weight' is in an earlier part"):
        open_checkpoint(path)
