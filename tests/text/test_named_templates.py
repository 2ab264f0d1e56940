"""Of several chat templates, the one that `transformers` selects is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_tokenizers import OnlyTokenizer, byte_level_metadata, ggml

from fd_core.errors import BadRequest
from fd_core.models.loading.tokenizer_source import read_tokenizer_folder
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.prompt_reader import PromptReader
from fd_core.text.tokenizer import load_tokenizer

TURNS = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SOURCES = {name: f"{name}: {{{{ messages[0].content }}}} {{{{ tools | length }}}}" for name in ("tool_use", "rag")}
SOURCES["default"] = "default: {{ messages[0].content }}{% if tools %} with tools{% endif %}"


def listed(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": SOURCES[name]} for name in names]


FOLDERS: dict[str, dict[str, Any]] = {
    "one": {"chat_template": SOURCES["default"]},
    "a list": {"chat_template": listed("default", "tool_use", "rag")},
    "a list without default": {"chat_template": listed("tool_use", "rag")},
    "a list without tool_use": {"chat_template": listed("default", "rag")},
    "an object": {"chat_template": SOURCES},
    "files": {"chat_template.jinja": "default", "additional_chat_templates/tool_use.jinja": "tool_use"},
    "files over a list": {"chat_template": listed("rag"), "chat_template.jinja": "default"},
    "additional files only": {
        "chat_template": SOURCES["default"],
        "additional_chat_templates/tool_use.jinja": "tool_use",
        "additional_chat_templates/rag.jinja": "rag",
    },
}


def write(folder: Path, files: dict[str, Any]) -> None:
    content = load_tokenizer(ggml(byte_level_metadata([], add_bos_token=False))).backend.to_str()
    (folder / "tokenizer.json").write_text(content)
    settings = {name: value for name, value in files.items() if name == "chat_template"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in files.keys() - settings:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(SOURCES[files[name]])


def reader_of(folder: Path) -> PromptReader:
    tokenizer = load_tokenizer(OnlyTokenizer(read_tokenizer_folder(folder)))
    return PromptReader(tokenizer, ChatTemplate.of(tokenizer))


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("template", [None, "rag", "tool_use", "default"])
@pytest.mark.parametrize("files", FOLDERS.values(), ids=list(FOLDERS))
def test_same_template_is_selected_as_in_transformers(
    files: dict[str, Any], template: str | None, tools: Any, tmp_path: Path
) -> None:
    write(tmp_path, files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    named = theirs.chat_template if isinstance(theirs.chat_template, dict) else {}
    if template is not None and template not in named:
        pytest.skip("an unknown name is a template source")
    reader = reader_of(tmp_path)
    kwargs = {"tools": tools, "chat_template": template}
    try:
        expected = theirs.apply_chat_template(TURNS, tokenize=False, **kwargs)
    except ValueError:
        with pytest.raises(BadRequest, match="no default; select one with chat_template: rag, tool_use"):
            reader.chat(TURNS, tools=tools, template=template)
    except TypeError:  # `tools | length` of none
        with pytest.raises(BadRequest, match="cannot render"):
            reader.chat(TURNS, tools=tools, template=template)
    else:
        ids = reader.chat(TURNS, tools=tools, template=template).ids
        assert reader._tokenizer.decode(ids) == expected
    finally:
        reader.close()


def test_templates_without_default_still_serve_tools(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": listed("tool_use")})
    reader = reader_of(tmp_path)
    assert reader._tokenizer.decode(reader.chat(TURNS, tools=TOOLS).ids) == "tool_use: hi 1"
    assert reader.own_template("rag") is None
    assert reader.template_source is None
    reader.close()


def test_template_of_the_operator_replaces_all(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": listed("default", "tool_use")})
    tokenizer = load_tokenizer(OnlyTokenizer(read_tokenizer_folder(tmp_path)))
    template = ChatTemplate.of(tokenizer, "own {{ tools | length }}")
    assert template is not None and template.render(TURNS, TOOLS) == "own 1"


def test_variables_of_named_templates_are_known(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": [*listed("default"), {"name": "tool_use", "template": "{{ enable_thinking }}"}]})
    reader = reader_of(tmp_path)
    assert reader.switches_reasoning and not reader.supports_effort
    reader.close()
