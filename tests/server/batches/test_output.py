"""The output file: whole lines, atomic completion, and resumption after an interrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fd_core.errors import ConfigError
from fd_core.server.batches.lines import AnswerFile, BatchLine, LineError, answered, failed

ONE = answered(BatchLine(1, "a"), 200, "r", b"{}")
TWO = failed(BatchLine(2, "b"), LineError("x", "line 2: no"))


def test_file_appears_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with AnswerFile(path) as file:
        file.write(ONE)
        assert not path.exists()
        file.write(TWO)
        file.finish()
    assert len(path.read_bytes().splitlines()) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="exists already"):
        AnswerFile(path)


@pytest.mark.parametrize(
    "torn", [b"", b'{"id"', b'{"id":"batch_req_00000002","custom_id":"b","response":null,"error":null}']
)
def test_run_resumes_after_the_last_whole_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out"
    with AnswerFile(path) as file:
        file.write(ONE)
    partial = tmp_path / "out.partial"
    partial.write_bytes(partial.read_bytes() + torn)
    with AnswerFile(path) as file:
        assert list(file.known) == [1]
        assert file.known[1].ok
        file.write(TWO)
        file.finish()
    assert [line[:27] for line in path.read_bytes().splitlines()] == [
        b'{"id":"batch_req_00000001",',
        b'{"id":"batch_req_00000002",',
    ]


def test_file_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with AnswerFile(path) as file:
        file.write(ONE)
        with pytest.raises(ConfigError, match="another run writes"):
            AnswerFile(path)
        file.write(TWO)
        file.finish()
    assert len(path.read_bytes().splitlines()) == 2


def test_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("a shopping list\n")
    with pytest.raises(ConfigError, match="not the output"):
        AnswerFile(tmp_path / "out")
    assert (tmp_path / "out.partial").read_text() == "a shopping list\n"
    with pytest.raises(ConfigError, match="cannot write"):
        AnswerFile(tmp_path / "nowhere" / "out")
