from pathlib import Path

import peers
import pytest


def test_flags_become_lists_and_folders():
    options = peers.parse(["--engines", "fd_core,openvino", "--workloads=w1", "--env", "ov=/some/where"])
    assert options.engines == ["fd_core", "openvino"]
    assert options.workloads == ["w1"]
    assert options.env == {"ov": Path("/some/where")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "fd_core,unknown"], "unknown is not among"),
        (["--workloads", ","], "nothing is not among"),
        (["--env", "ov"], "NAME=DIR"),
        (["--env", "strange=/x"], "NAME=DIR"),
        (["--model", "/nowhere/model.gguf"], "no such file"),
        (["--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_wrong_flags_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        peers.parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_recorded_command_has_no_local_paths():
    arguments = ["--rounds", "3", "--env", "ov=/home/me/ov", "--model=/home/me/m.gguf", "--http", "--cache", "/home/me"]
    assert peers.shown(arguments) == ["--rounds", "3", "--model", "m.gguf", "--http"]
