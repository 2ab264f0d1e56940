"""The tokenizer files of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import JsonTokenizerSource
from fd_core.models.loading.json_file import read_json_object, read_limited

__all__ = ["folder_tokenizer"]

_TEMPLATE_LIMIT = 1 << 20


def folder_tokenizer(folder: Path) -> JsonTokenizerSource:
    """Read tokenizer.json, tokenizer_config.json and the chat template; `ModelError` if there is no tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = "save it with transformers' save_pretrained() of a fast tokenizer"
        raise ModelError(f"{folder} has no tokenizer.json", field="tokenizer", hint=hint)
    settings_path = folder / "tokenizer_config.json"
    settings = read_json_object(settings_path) if settings_path.is_file() else {}
    return JsonTokenizerSource(path, read_limited(path), settings, _chat_template(folder, settings))


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the template of chat_template.jinja, chat_template.json or the settings, the first that exists."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return read_limited(jinja, _TEMPLATE_LIMIT).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{jinja} is not UTF-8", field="chat_template") from error
    separate = folder / "chat_template.json"
    source = read_json_object(separate) if separate.is_file() else settings
    template = source.get("chat_template")
    if isinstance(template, list):
        # several named templates; the plain conversation is called "default"
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder}: chat_template must be a string", field="chat_template")
    return template
