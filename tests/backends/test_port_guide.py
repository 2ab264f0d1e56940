"""The guide to devices of Paddle works as written."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.testing.documents import follow, run_line

if find_spec("paddle") is None:
    pytest.skip("Paddle is not installed; `nox -s paddle` follows the guide", allow_module_level=True)


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The folder after all steps, and the output of each command."""
    return follow("port-a-paddle-device.md", tmp_path_factory.mktemp("port"))


def test_every_command_succeeds_on_the_ported_operations(port):
    _, outputs = port
    before, after, kit = (words for line, words in outputs if "doctor" in line or "conformance" in line)
    for words in (before, after):
        assert "all operations are present and correct" in words
    listed = before.split("slow on a device: ")[1]
    assert all(f"{name} (" in listed for name in ("moe", "paged_attention", "rope", "rms_norm"))
    assert "emulated" in kit


def test_wrong_layout_of_exported_blocks_fails(port):
    folder, _ = port
    source = folder / "fd_mychip" / "ops.py"
    right = source.read_text()
    assert right.count(".transpose([0, 2, 1, 3])") == 1
    source.write_text(right.replace(".transpose([0, 2, 1, 3])", ""))
    output = run_line(folder, "fdcore doctor mychip --only export_blocks", code=4)
    assert "missing or wrong: allocate_kv, write_kv, export_blocks, import_blocks" in output
    source.write_text(right)


def test_port_passes_ruff(port):
    folder, _ = port
    pytest.importorskip("ruff")
    run_line(folder, "python -m ruff check .")
    run_line(folder, "python -m ruff format --check .")
