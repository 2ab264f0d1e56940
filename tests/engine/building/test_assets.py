"""Default sampling parameters are those of the user, then of the source that the user names, then of the model."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fd_core.config import EngineConfig
from fd_core.config.generation import GenerationDefaults
from fd_core.engine.building.assets import find_assets
from fd_core.engine.llm import LLM
from fd_core.errors import ConfigError, ModelError
from fd_core.models import catalog
from fd_core.testing.models.checkpoints import ENGINE_CASE, write_checkpoint
from fd_core.text.tokenizer import byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_checkpoint(ENGINE_CASE, tmp_path / "model")
    byte_tokenizer().backend.save(str(made / "tokenizer.json"))
    values = {"temperature": 0.6, "top_k": 20, "do_sample": True, "bos_token_id": 1}
    (made / "generation_config.json").write_text(json.dumps(values))
    return made


def defaults(model: str | Path, source: str = "auto", **override: float) -> GenerationDefaults:
    changed = GenerationDefaults(**override)  # type: ignore[arg-type]
    config = EngineConfig(model=str(model), generation_config=source, override_generation_config=changed)
    return find_assets(config).config.override_generation_config


def test_checkpoint_defines_the_defaults(folder: Path) -> None:
    assert defaults(folder) == GenerationDefaults(temperature=0.6, top_k=20)
    assert defaults(folder, top_k=0, min_p=0.1) == GenerationDefaults(temperature=0.6, top_k=0, min_p=0.1)


def test_none_ignores_the_checkpoint(folder: Path) -> None:
    assert defaults(folder, "none", top_p=0.5) == GenerationDefaults(top_p=0.5)


@pytest.mark.parametrize("name", ["", "generation_config.json"])
def test_file_or_folder_replaces_the_checkpoint(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (str(tmp_path / name), f"~/{name}"):
        assert defaults(folder, source) == GenerationDefaults(max_new_tokens=7)


def test_packaged_model_has_the_values_of_its_authors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = catalog.KNOWN[0]
    monkeypatch.setattr(catalog.packaged, "find", lambda *_, **__: folder)
    (folder / "generation_config.json").unlink()
    assert known.generation == GenerationDefaults(temperature=0.2, top_p=0.9)
    assert defaults(known.name) == known.generation


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"temperature": -1}', "temperature=-1: expected"), ('{"top_k": "all"}', "top_k='all': expected"), ("[]", "")],
)
def test_unusable_generation_config_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=f"generation_config.*{message}"):
        defaults(folder)
    if message:
        assert defaults(folder, "none") == GenerationDefaults()


def test_unknown_architecture_is_named_before_the_tokenizer_is_read(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "architectures": ["T5EncoderModel"]}))
    for text in ("{}", None):
        (folder / "tokenizer.json").write_text(text) if text else (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"config\.json: unsupported architecture 'T5EncoderModel'"):
            defaults(folder)


def test_missing_source_is_named(folder: Path) -> None:
    with pytest.raises((ConfigError, ModelError), match=r"absent\.json"):
        defaults(folder, "absent.json")


def test_offline_model_uses_the_defaults(folder: Path) -> None:
    llm = LLM(str(folder), backend="reference", num_kv_blocks=40)
    try:
        assert llm.default_params().temperature == 0.6
        assert msgspec.structs.replace(llm.default_params(), top_k=0).top_k == 0
    finally:
        llm.close()
