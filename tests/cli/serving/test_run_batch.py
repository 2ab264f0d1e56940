"""`fdcore run-batch` over an engine whose backend is scripted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fd_core.cli.app import app
from tests.engine.faults import Faults

ENGINE = ("--model", "null", "--backend", "null", "--engine", "inproc", "--max-num-seqs", "4")


def line(number: int, **body: Any) -> str:
    body = {"messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 4, "seed": 1} | body
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def run(folder: Path, *options: str) -> Any:
    arguments = ["run-batch", "-i", str(folder / "in"), "-o", str(folder / "out"), *ENGINE, *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def answers(folder: Path, name: str = "out") -> dict[str, Any]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    assert len({each["id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_every_line_is_answered_and_bad_lines_explain_why(tmp_path: Path) -> None:
    lines = [line(0), line(1, temperature=9), "not json", line(3)]
    (tmp_path / "in").write_text("\n".join(lines))
    result = run(tmp_path)
    assert (result.exit_code, result.stdout) == (1, f"{tmp_path / 'out'}: 2 answered, 2 failed\n")
    found = answers(tmp_path)
    assert found["c0"]["response"]["body"]["choices"][0]["message"]["content"]
    assert found["c1"]["response"]["status_code"] == 400
    assert found["c1"]["response"]["body"]["error"]["param"] == "temperature"
    assert "line 3" in found[None]["error"]["message"]


def test_embedding_lines_are_answered(tmp_path: Path) -> None:
    request = {"custom_id": "v", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["a", "b"]}}
    (tmp_path / "in").write_text(json.dumps(request))
    assert run(tmp_path).exit_code == 0
    assert len(answers(tmp_path)["v"]["response"]["body"]["data"]) == 2


def test_api_key_and_queue_limit_of_the_server_do_not_apply(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FD_API_KEY", "secret")
    (tmp_path / "in").write_text("\n".join(line(number) for number in range(30)))
    assert run(tmp_path).exit_code == 0
    assert len(answers(tmp_path)) == 30


def test_output_is_not_overwritten_and_missing_input_is_named(tmp_path: Path) -> None:
    missing = run(tmp_path)
    assert missing.exit_code == 2 and "--input" in missing.output
    (tmp_path / "in").write_text(line(0))
    (tmp_path / "out").write_text("precious")
    refused = run(tmp_path)
    assert refused.exit_code == 2 and "exists already" in refused.output
    assert (tmp_path / "out").read_text() == "precious"


def test_input_that_is_a_pipe_is_refused_with_the_remedy(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in")
    with subprocess.Popen(["/bin/sh", "-c", 'echo "$0" > "$1"', line(0), str(tmp_path / "in")]):
        refused = run(tmp_path)
    assert refused.exit_code == 2 and "write the requests to a file first" in refused.output
    assert not (tmp_path / "out").exists()


def test_results_of_other_requests_are_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line(0))
    (tmp_path / "out.partial").write_text('{"id":"batch_req_00000001","custom_id":"other"}\n')
    result = run(tmp_path)
    assert result.exit_code == 2 and "'other'" in result.output


def test_changed_line_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(f"{line(0)}\n{line(1)}\n")
    assert run(tmp_path).exit_code == 0
    (tmp_path / "out").rename(tmp_path / "out.partial")
    (tmp_path / "in").write_text(f"{line(0)}\n{line(1, max_tokens=3)}\n")
    result = run(tmp_path)
    assert result.exit_code == 2 and "has an answer to" in result.output
    (tmp_path / "in").write_text(f"{line(0)}\r\n{line(1)}")
    assert run(tmp_path).exit_code == 0


def test_interrupted_run_resumes_with_the_same_answers(tmp_path: Path, faults: Faults) -> None:
    """It is killed while a step that computes a longer line, in the middle, is held."""
    lengths = {45: 300}
    lines = [line(number, max_tokens=lengths.get(number, 60), ignore_eos=True) for number in range(90)]
    (tmp_path / "in").write_text("\n".join(lines))
    command = [
        sys.executable,
        "-m",
        "fd_core.cli",
        "run-batch",
        "-i",
        "in",
        "-o",
        "out",
        *ENGINE,
        "--backend",
        "faulty",
    ]
    faults.arm("hold", position=250)
    partial = tmp_path / "out.partial"
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (faults.count and partial.exists() and partial.stat().st_size > 4000):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    whole = partial.read_bytes()
    before = [json.loads(each) for each in whole[: whole.rfind(b"\n") + 1].splitlines()]
    assert 0 < len(before) < 90
    with partial.open("ab") as file:
        os.write(file.fileno(), b'{"id":"batch_req_0000')
    assert run(tmp_path).exit_code == 0
    after = answers(tmp_path)
    assert len(after) == 90
    for each in before:
        assert after[each["custom_id"]] == each
