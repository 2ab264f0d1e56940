"""Tokenizer files of a checkpoint: tokens, chat templates and end-of-text tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from fd_core.errors import ModelError
from fd_core.models.loading.files import read_json_object, read_limited

T = TypeVar("T")

DEFAULT_TEMPLATE: Final = "default"
_CONTROL: Final = 3
_HIGHEST_ID: Final = 2**31 - 1
_TEMPLATE_LIMIT: Final = 1 << 20
_MAX_TEMPLATES: Final = 64
_TURN_ENDS: Final = tuple(
    """
    <|im_end|> <|eot_id|> <|eom_id|> <|eot|> <end_of_turn> <|endofturn|> <|end_of_turn|> </s> <|end|> <|return|>
    <|call|>
    """.split()
)
"""Tokens that end a turn; files do not always declare them as end-of-sequence tokens."""
_MESSAGE_END: Final = "<|end|>"
"""Ends a turn, except in the harmony format, where it ends one of several messages in a turn."""
_HARMONY_END: Final = "<|return|>"


class KnownToken(NamedTuple):
    """A token of the vocabulary."""

    id: int
    special: bool


@dataclass(frozen=True, slots=True)
class JsonTokenizerSource:
    """Tokenizer in the format of the `tokenizers` library: the bytes of tokenizer.json and its settings."""

    origin: Path
    content: bytes
    settings: Mapping[str, Any]
    """Content of tokenizer_config.json, merged with older files; may be empty."""
    chat_template: str | None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Templates for other purposes by name, such as `tool_use`."""
    lowercase: bool = False
    """True to convert texts to lower case first, also where the file does not."""

    @property
    def digest(self) -> str:
        """Hex SHA-256 that identifies the mapping of token ids."""
        added = {name: value for name, value in self.settings.items() if "token" in name}
        added |= {"do_lower_case": True} if self.lowercase else {}
        return hashlib.sha256(self.content + json.dumps(added, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def named_ends(self) -> list[Any]:
        """End-of-sequence tokens that the settings name: ids or texts."""
        return [token_text(self.settings.get("eos_token"))]

    def find(self, texts: Collection[str]) -> dict[str, KnownToken]:
        """Return the tokens among `texts` that the vocabulary has."""
        listed = _json_or_none(self.content, _TokenizerAddedTokens)
        found = {each.content: KnownToken(each.id, each.special) for each in (listed.added_tokens if listed else ())}
        decoder = self.settings.get("added_tokens_decoder")
        for key, token in decoder.items() if isinstance(decoder, dict) else ():
            text = token_text(token)
            if text is not None and str(key).isdecimal():
                found.setdefault(text, KnownToken(int(key), isinstance(token, dict) and token.get("special") is True))
        if not found.keys() >= set(texts):
            vocabulary = _json_or_none(self.content, _TokenizerFile)
            ids = {} if vocabulary is None else vocabulary.model.ids()
            for text in texts:
                if text in ids:
                    found.setdefault(text, KnownToken(ids[text], special=False))
        return {text: found[text] for text in texts if text in found}


@dataclass(frozen=True, slots=True)
class GgmlTokenizerSource:
    """A tokenizer as GGUF metadata: the `tokenizer.ggml.*` keys without that prefix."""

    origin: Path
    metadata: Mapping[str, Any]
    chat_template: str | None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Templates for other purposes by name, such as `tool_use`."""

    @property
    def digest(self) -> str:
        """Hex SHA-256 that identifies the mapping of token ids."""
        return hashlib.sha256(json.dumps(self.metadata, sort_keys=True, default=list).encode()).hexdigest()

    @property
    def named_ends(self) -> list[Any]:
        """End-of-sequence tokens that the metadata names: ids or texts."""
        return [self.metadata.get(f"{kind}_token_id") for kind in ("eos", "eot", "eom")]

    def find(self, texts: Collection[str]) -> dict[str, KnownToken]:
        """Return the tokens among `texts` that the vocabulary has."""
        tokens, types = (_listed(self.metadata.get(key)) for key in ("tokens", "token_type"))
        return {
            token: KnownToken(index, special=index < len(types) and types[index] == _CONTROL)
            for index, token in enumerate(tokens)
            if token in texts
        }


TokenizerSource = JsonTokenizerSource | GgmlTokenizerSource


class _TokenizerAddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerAddedTokens(msgspec.Struct):
    added_tokens: list[_TokenizerAddedToken] = []


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}

    def ids(self) -> Mapping[str, int]:
        """Return the ids by token; some kinds of model list tokens with their scores, in the order of ids."""
        if isinstance(self.vocab, dict):
            return self.vocab
        return {each[0]: index for index, each in enumerate(self.vocab) if isinstance(each, list) and each}


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel = msgspec.field(default_factory=_TokenizerModel)


def end_tokens(named: Mapping[str, Any], tokenizer: TokenizerSource | None, rows: int | None) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text, each once.

    They are the `eos_token_id` values in `named`, by path, those in the tokenizer's files, and the known turn ends that
    are special tokens or part of a chat template. A value is an id, an id as text, a token's text, or a list of these;
    null and ids without one of `rows` embedding rows are dropped. Raises `ModelError` for an `eos_token_id` of another
    type.
    """
    of_tokenizer = [] if tokenizer is None else tokenizer.named_ends
    texts = {each for value in (*named.values(), *of_tokenizer) for each in _listed(value) if isinstance(each, str)}
    known = {} if tokenizer is None else tokenizer.find(texts.union(_TURN_ENDS))
    ids: list[int | None] = []
    for origin, value in named.items():
        for name in _listed(value):
            if name is not None and (end := _end_id(name, known)) is None:
                raise ModelError(f"{origin}: eos_token_id must be token ids; found {str(name)[:60]!r}")
            ids.append(None if name is None else end)
    ids += [_end_id(name, known) for value in of_tokenizer for name in _listed(value)]
    if tokenizer is not None:
        templates = "".join((tokenizer.chat_template or "", *tokenizer.named_templates.values()))
        skipped = _MESSAGE_END if _HARMONY_END in known else None
        ids += [
            known[text].id
            for text in _TURN_ENDS
            if text in known and text != skipped and (known[text].special or text in templates)
        ]
    highest = _HIGHEST_ID if rows is None else rows - 1
    return tuple(each for each in dict.fromkeys(ids) if each is not None and 0 <= each <= highest)


def _end_id(name: Any, known: Mapping[str, KnownToken]) -> int | None:
    if isinstance(name, str) and name in known:
        return known[name].id
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        return None
    try:
        return int(name) if int(name) == float(name) else None
    except (ValueError, OverflowError):
        return None


def read_tokenizer_folder(folder: Path) -> JsonTokenizerSource:
    """Return the tokenizer of a folder, with the settings that `transformers` would read; `ModelError` without one."""
    path, settings_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not path.is_file():
        hint = "save it with transformers' save_pretrained() of a fast tokenizer"
        raise ModelError(f"{folder} has no tokenizer.json", field="tokenizer", hint=hint)
    settings = read_json_object(settings_path) if settings_path.is_file() else {}
    templates = _chat_templates(folder, settings)
    if "added_tokens_decoder" not in settings:
        settings |= _older_settings(folder, settings)
    default = templates.pop(DEFAULT_TEMPLATE, None)
    return JsonTokenizerSource(
        path,
        read_limited(path),
        settings,
        chat_template=default,
        named_templates=templates,
        lowercase=read_text_settings(folder).get("do_lower_case") is True,
    )


def read_text_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of sentence-transformers for the texts of a model; empty if there are none."""
    file = folder / "sentence_bert_config.json"
    return read_json_object(file) if file.is_file() else {}


def named_templates(given: Any, origin: object) -> dict[str, str]:
    """Return chat templates by name from a string, which is the default one, or an object or list of named ones."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT_TEMPLATE: given}
    if isinstance(given, list):
        pairs = ((each.get("name"), each.get("template")) for each in given if isinstance(each, dict))
        given = {name: text for name, text in pairs if isinstance(name, str) and text is not None}
    if not isinstance(given, dict) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ModelError(
            f"{origin}: chat_template must be a string, or named templates that are strings", field="chat_template"
        )
    return given


def token_text(token: Any) -> str | None:
    """Return the text of a token, given as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _older_settings(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of special_tokens_map.json and added_tokens.json if `added_tokens_decoder` is missing."""
    path = folder / "special_tokens_map.json"
    older = {
        name: {**value, "special": True} if isinstance(value, dict) and "content" in value else value
        for name, value in (read_json_object(path) if path.is_file() else {}).items()
    }
    extra = "extra_special_tokens"
    if isinstance(older.get(extra), list) and isinstance(settings.get(extra), list):
        older[extra] = [*settings[extra], *(each for each in older[extra] if each not in settings[extra])]
    path = folder / "added_tokens.json"
    if path.is_file():
        merged = {**settings, **older}
        named = [value for name, value in merged.items() if name.endswith("_token")]
        lists = (merged.get(name) for name in (extra, "additional_special_tokens"))
        special = {token_text(each) for each in (*named, *(each for some in lists for each in _listed(some)))}
        older["added_tokens_decoder"] = {
            str(index): {"content": text, "special": text in special, "normalized": text not in special}
            for text, index in read_json_object(path).items()
        }
    return older


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name: those of *.jinja files, else of chat_template.json, else of the settings."""
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    others = folder / "additional_chat_templates"
    for path in sorted(others.glob("*.jinja")) if others.is_dir() else ():
        files.setdefault(path.name.removesuffix(".jinja"), path)
    if len(files) > _MAX_TEMPLATES:
        raise ModelError(f"{others} has {len(files)} templates, the limit is {_MAX_TEMPLATES}", field="chat_template")
    if found := {name: _read_template(path) for name, path in files.items() if path.is_file()}:
        return found
    separate = folder / "chat_template.json"
    source = read_json_object(separate) if separate.is_file() else settings
    return named_templates(source.get("chat_template"), folder)


def _read_template(path: Path) -> str:
    try:
        return read_limited(path, _TEMPLATE_LIMIT).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8", field="chat_template") from error


def _json_or_none(content: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None  # `load_tokenizer` reports what is wrong


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
