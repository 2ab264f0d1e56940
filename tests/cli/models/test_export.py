"""`fdcore models export` and `fdcore ps`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.text.tokenizer import load_tokenizer
from tests.cli.models.test_quantize import TOKENIZER
from tests.models.loading.tiny_gguf import write_gguf
from tests.server.fakes import FakeClient, live


def test_exported_tokenizer_is_read_by_other_tools(tmp_path: Path, monkeypatch) -> None:
    import tokenizers
    import transformers

    from fd_core.models.opening import open_checkpoint

    source, folder = write_gguf(tmp_path / "tiny.gguf", extra=TOKENIZER), tmp_path / "exported"
    done = CliRunner().invoke(app, ["models", "export", str(source), str(folder)])
    assert (done.exit_code, done.stdout) == (0, f"{folder}\n")
    with open_checkpoint(source) as checkpoint:
        expected = load_tokenizer(checkpoint).encode("t1t1")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("t1t1") == tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("t1t1").ids
    assert theirs.encode("t1t1") == expected and theirs.eos_token_id == 47
    assert json.loads((folder / "config.json").read_text())["architectures"]
    again = CliRunner().invoke(app, ["models", "export", str(source), str(folder)])
    assert again.exit_code == 2 and f"FOLDER: {folder} exists already (use a new folder)" in again.stderr


def test_tilde_in_quotes_is_the_home_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "tiny.gguf", extra=TOKENIZER)
    done = CliRunner().invoke(app, ["models", "export", "~/tiny.gguf", "~/exported"])
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path}/exported\n")
    missing = CliRunner().invoke(app, ["serve", "~/tiny.gguf", "--api-key-file=~/keys", "--backend", "null"])
    assert f"cannot read {tmp_path}/keys: no such file" in missing.stderr


def test_ps_shows_the_models_and_the_load_of_a_server() -> None:
    with live(lambda: FakeClient("hi"), api_keys=("sesame",), protect_pages=True) as server:
        shown = CliRunner().invoke(app, ["ps", "--url", server.url, "--api-key", "sesame"], env={"COLUMNS": "120"})
        refused = CliRunner().invoke(app, ["ps", "--url", server.url])
    assert shown.exit_code == 0, shown.output
    assert server.url in shown.stdout and "0 requests running, 0 waiting" in shown.stdout
    assert refused.exit_code == 1 and "401" in refused.stderr


def test_ps_without_a_server_gives_the_reason() -> None:
    ended = CliRunner().invoke(app, ["ps", "--url", "http://127.0.0.1:9"])
    assert ended.exit_code == 1
    assert (
        ended.stderr
        == "fdcore: http://127.0.0.1:9: cannot connect to the server: connection refused (check that it is running)\n"
    )
