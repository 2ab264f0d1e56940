"""The most common mistakes, through the command's entry point: one line names the setting and the fix."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.chats.api_client import ServerAnswer
from fd_core.cli.serving import startup
from fd_core.config import EngineConfig, resolve_limits
from fd_core.engine.clients.launch import open_client
from fd_core.errors import ConfigError, FdError, ModelError, PluginError
from fd_core.http.connections import listening
from fd_core.http.connections.listening import bind_socket
from fd_core.models.catalog import resolve_model
from fd_core.plugins import Plugins
from tests.server.fakes import FakeClient, byte_tokenizer, live

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def fdcore(*arguments: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fd_core.cli", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )


def assert_one_line(ended: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert ended.returncode == code, ended.stderr
    for each in words:
        assert each in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_misspelled_model_name_is_corrected(run_cli: RunCli) -> None:
    assert_one_line(run_cli("serve", "smolm2"), 3, "no such model: 'smolm2'; did you mean smollm2?", "a .gguf file")


def test_misspelled_hub_name_suggests_the_cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Path:
        raise ModelError("no such repository", field="model", hint="check it")

    monkeypatch.setattr("fd_core.models.fetching.hub.fetch", absent)
    monkeypatch.setattr("fd_core.models.fetching.hub.cached", lambda _: [("org/large-model", 1, tmp_path)])
    with pytest.raises(ModelError, match=r"no such repository; did you mean org/large-model\? \(check it\)"):
        resolve_model("org/lagre-model", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"num_kv_blocks": 1000}, r"1000 KV blocks need 1,000,000 bytes, but 5,500 are free \(use at most 5,"),
        ({"kv_cache_memory": 9000}, r"=9,000 exceeds the 5,500 bytes that are free for KV \(lower it, or omit it"),
        ({"kv_cache_memory": 900}, r"=900 is smaller than one KV block of 1,000 bytes \(increase it"),
        ({"free_bytes": 900}, r"for KV after loading the weights \(stop other programs, or use a smaller model"),
        ({"free_bytes": -5, "num_kv_blocks": 10}, r"but 0 are free \(use at most 0,"),
        ({"free_bytes": -5, "kv_cache_memory": 9000}, "exceeds the 0 bytes that are free for KV"),
        ({"free_bytes": -5}, "0 bytes are free for KV after"),
    ],
)
def test_too_little_memory_is_reported_with_what_fits(settings: dict[str, int], words: str) -> None:
    settings = {"free_bytes": 5500} | settings
    free_bytes = settings.pop("free_bytes")
    with pytest.raises(ConfigError, match=words) as refused:
        resolve_limits(
            EngineConfig(model="x", **settings),
            model_max_len=32,
            vocab_size=10,
            bytes_per_block=1000,
            free_bytes=free_bytes,
            default_pipeline_depth=1,
            default_batched_tokens=64,
        )
    assert refused.value.field in ("--num-kv-blocks", "--kv-cache-memory")


def test_port_in_use_is_reported_with_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = fdcore("serve", "smollm2", "--port", str(port))
    who = f", process {os.getpid()} (stop that process" if sys.platform == "linux" else "(stop that process"
    assert_one_line(
        ended, 2, f"--port: cannot listen on 127.0.0.1 port {port}: address already in use", who, "--port 0"
    )


def test_port_owner_fdcore_is_named_without_its_flags() -> None:
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)", "fdcore", "serve", "--api-key", "secret"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=rf"in use by `fdcore serve`, process {process.pid} \("):
                bind_socket("127.0.0.1", port)
        finally:
            process.kill()


def test_port_of_another_user_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_holds", lambda pid, links: False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert listening.port_holder(taken.getsockname()[1]) == "a process of another user"
    assert listening.port_holder(0) is None


@pytest.mark.parametrize("compiler, what", [("/nowhere/c++", "set CXX"), (None, "apt-get install g++")])
def test_missing_compiler_is_named_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, what: str
) -> None:
    build = pytest.importorskip("fd_core.ops.native.build")
    monkeypatch.setenv("FD_CACHE", str(tmp_path))
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CXX", compiler)
    with pytest.raises(
        build.BuildError, match=re.escape(f"({compiler or 'c++'}) was found; ") + f".*{re.escape(what)}"
    ):
        build.load()


def test_wrong_key_is_reported_with_the_flag_to_set() -> None:
    with live(lambda: FakeClient("From afar"), api_keys=("sesame",)) as server:
        ended = fdcore("chat", "--url", server.url, "--api-key", "mustard", typed="hi\n")
    assert_one_line(ended, ServerAnswer.exit_code, "status 401", "--api-key-file FILE or in FD_API_KEY")


def test_context_too_long_is_reported_with_both_lengths(run_cli: RunCli) -> None:
    with live(lambda: FakeClient("From afar")) as server:
        ended = run_cli("complete", "x" * 1000, "--url", server.url)
    assert_one_line(ended, FdError.exit_code, "the prompt has 1000 tokens, but the context length is 400", "shorten")


def test_chat_with_a_model_without_template_fails_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    model = startup.LocalModel(EngineConfig(model="base"), None, byte_tokenizer(), None)
    monkeypatch.setattr(startup, "find_model", lambda *_: model)
    monkeypatch.setattr(startup, "running_engine", lambda *_: pytest.fail("the model was loaded"))
    ended = CliRunner().invoke(app, ["chat", "base"], input="hi\n")
    assert ended.exit_code == 3
    assert ended.stderr.startswith("fdcore: model: base has no chat template")
    assert "use `fdcore complete`" in ended.stderr


@pytest.mark.parametrize(
    "flag, value",
    [("--backend", "cuda"), ("--scheduler", "best"), ("--kv-store", "redsi:x"), ("--scheduling-policy", "lifo")],
)
def test_missing_plugin_is_reported_with_the_installed_ones(
    flag: str, value: str, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_CACHE", str(tmp_path))
    ended = run_cli("serve", "smollm2", "--port", "0", flag, value)
    assert_one_line(ended, 4, f"{flag}: unknown ", f"'{value.partition(':')[0]}' (available: ")
    assert list(tmp_path.iterdir()) == [], "nothing is fetched or compiled before the check"


def test_plugin_of_a_common_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Plugins.discover([])
    with pytest.raises(PluginError, match="`fdcore install gpu_cuda` installs the plugin"):
        installed.choose_backend("cuda")
    monkeypatch.setattr(installed, "offered", lambda kind: {"gpu_cuda": None})
    with pytest.raises(PluginError, match=r"unknown backend 'cuda' \(available: gpu_cuda; use gpu_cuda\)"):
        installed.choose_backend("cuda")


def test_broken_plugin_is_reported_with_its_missing_attribute(tmp_path: Path) -> None:
    metadata = tmp_path / "broken_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fd_core]\nbroken = broken_plugin\n")
    (tmp_path / "broken_plugin.py").write_text("import nosuchlibrary\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    ended = fdcore("serve", "smollm2", "--port", "0", "--backend", "broken", PYTHONPATH=path)
    assert_one_line(
        ended,
        4,
        "plugin broken-plugin (broken): ModuleNotFoundError",
        "(install the package that provides nosuchlibrary",
    )


def test_full_disk_is_reported_before_downloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, used, _ = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("", (), {"total": total, "used": used, "free": 10**6})())
    with pytest.raises(ModelError, match=r"needs 197 MB in .*, whose disk has 1 MB free \(.* set FD_CACHE") as refused:
        resolve_model("smollm2", cache_dir=tmp_path)
    assert (refused.value.field, refused.value.exit_code) == ("FD_CACHE", 3)


@pytest.mark.parametrize(
    ("arguments", "variable", "word"),
    [
        (["serve", "/tmp/model-\udcff"], "", "argument 2 is not UTF-8"),
        (["serve", "null", "--backend", "null", "--served-model-name", "a\udcff"], "", "argument 6 is not UTF-8"),
        (["route", "--worker", "http://\udcff:80"], "", "argument 3 is not UTF-8"),
        (["serve", "--backend", "null"], "a\udcff", "FD_MODEL is not UTF-8"),
    ],
)
def test_non_utf_8_bytes_are_a_one_line_error(arguments: list[str], variable: str, word: str) -> None:
    ended = fdcore(*arguments, FD_MODEL=variable)
    assert_one_line(ended, 2, word)
    assert "\udcff" not in ended.stderr


def test_non_utf_8_setting_never_reaches_an_engine() -> None:
    with pytest.raises(ConfigError, match="is not UTF-8"):
        asyncio.run(open_client(EngineConfig(backend="null", model="a\udcff"), None))


def test_address_for_transfers_is_checked_before_the_model(run_cli: RunCli) -> None:
    options = ("--port", "0", "--role", "prefill", "--transfer-host", "203.0.113.1")
    assert_one_line(run_cli("serve", "smolm2", *options), 2, "--transfer-host", "203.0.113.1")


def test_form_of_adapters_is_checked_before_the_model(run_cli: RunCli) -> None:
    assert_one_line(run_cli("serve", "smolm2", "--lora-modules", "x"), 2, "--lora-modules: expected NAME=FOLDER")


def test_empty_text_is_named_as_the_argument(run_cli: RunCli) -> None:
    assert_one_line(run_cli("tokenize", "", "--model", "bytes"), 1, "TEXT is empty")


def test_empty_argument_too_many_is_visible(run_cli: RunCli) -> None:
    assert_one_line(run_cli("tokenize", "Hello", ""), 2, "got unexpected extra argument ''")
