"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import itemgetter
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fd_core.errors import BadRequest, ModelError
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.files import parse_json_object
from fd_core.models.loading.tokenizer_source import JsonTokenizerSource, token_text

# Texts are encoded one by one: the library's threads would only compete with steps for CPUs.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HOLES = 8
_FEW_IDS = 1 << 17
"""Ids may have holes; tables take space for each id up to the highest."""


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text; immutable, safe between threads. Ids at or beyond `vocab_size` stand for no text."""

    backend: tokenizers.Tokenizer
    decoding: Decoding
    bos_id: int | None = None
    eos_id: int | None = None
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Templates for other purposes by name, such as `tool_use`."""
    _tables: dict[tuple[str, ...], list[bytes]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has text."""
        return len(self._tokens)

    def tokens_from(self, first_id: int) -> dict[int, str]:
        """Return the tokens whose ids are at least `first_id`."""
        return {index: text for index, text in enumerate(self._tokens[first_id:], first_id) if text}

    @cached_property
    def longest_token(self) -> int:
        """Characters, at most, that one token stands for."""
        return max(map(len, self._tokens), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which are omitted from decoded text unless requested."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Control tokens with text, and their ids. Read-only."""
        texts = {self.backend.id_to_token(token_id): token_id for token_id in self.special_ids}
        return {text: token_id for text, token_id in texts.items() if text}

    @property
    def bos_token(self) -> str | None:
        """The text of the beginning-of-sequence token."""
        return None if self.bos_id is None else self.backend.id_to_token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the end-of-sequence token."""
        return None if self.eos_id is None else self.backend.id_to_token(self.eos_id)

    def encode(
        self, text: str | tuple[str, str], add_special: bool = True, second_text: int = 0, longest: int | None = None
    ) -> list[int]:
        """Return the ids of `text`; `add_special` adds the model's special tokens, such as BOS.

        Two texts are joined as the tokenizer does, and `second_text` is added to the ids of the second one. More than
        `longest` ids are reduced to it, special tokens included, at the end of a text, of the longer one first. Control
        tokens written out in the text become their ids: rendered chat templates rely on it. Raises `BadRequest` for
        text that is not valid Unicode (a lone surrogate), or that the tokenizer gives up on.
        """
        texts = [text] if longest is None or isinstance(text, str) else text
        try:
            # The call for a single text would hold the GIL until it returns.
            parts = self.backend.encode_batch_fast(texts, add_special_tokens=add_special and longest is None)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadRequest("text is not valid Unicode: it contains a lone surrogate") from error
        except BaseException as error:
            if not _panicked(error):
                raise
            raise BadRequest(f"the model's tokenizer failed on this text: {error}") from error
        found = parts[0] if longest is None else self._truncated(parts, add_special, longest)
        if not second_text:
            return list(found.ids)
        return [token_id + second_text * kind for token_id, kind in zip(found.ids, found.type_ids, strict=True)]

    def _truncated(self, parts: Sequence[tokenizers.Encoding], add_special: bool, longest: int) -> tokenizers.Encoding:
        special = self.backend.num_special_tokens_to_add(len(parts) > 1) if add_special else 0
        if longest <= special:
            raise BadRequest(
                f"truncate_prompt_tokens is {longest}, but the tokenizer adds {special} tokens; increase it",
                field="truncate_prompt_tokens",
            )
        sizes = [len(part) for part in parts]
        for part, size in zip(parts, _shares(sizes, longest - special), strict=True):
            part.truncate(size)
        return self.backend.post_process(parts[0], parts[1] if len(parts) > 1 else None, add_special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        A space that the encoder put before the first word is removed. Raises `BadRequest` for a negative id.
        """
        text = self.bytes_of(ids, skip_special).decode("utf-8", "replace")
        return text[1:] if self.decoding.drops_first_space and text.startswith(" ") else text

    def bytes_of(self, ids: Sequence[int], skip_special: bool = True) -> bytes:
        """Return the bytes that `ids` stand for, as the tokens carry them."""
        if ids and min(ids) < 0:
            raise BadRequest(f"token id {min(ids)} is negative")
        table = self.text_bytes_table if skip_special else self.byte_table
        size = len(table)
        return b"".join([table[token_id] for token_id in ids if token_id < size])

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; part of a character becomes U+FFFD (see `token_bytes`)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, control tokens included."""
        return self.bytes_of([token_id], skip_special=False)

    @cached_property
    def byte_table(self) -> list[bytes]:
        """The bytes of every token by id. Read-only."""
        return [self.decoding.to_bytes(token) for token in self._tokens]

    @cached_property
    def text_bytes_table(self) -> list[bytes]:
        """The bytes of every token by id, none for control tokens. Read-only."""
        table = list(self.byte_table)
        for token_id in self.special_ids:
            table[token_id] = b""
        return table

    def table_with(self, kept: tuple[str, ...]) -> list[bytes]:
        """Return `text_bytes_table` with the bytes of the control tokens named `kept`. Read-only."""
        found = [token_id for token_id in map(self.backend.token_to_id, kept) if token_id in self.special_ids]
        if not found:
            return self.text_bytes_table
        if kept not in self._tables:
            table = list(self.text_bytes_table)
            for token_id in found:
                table[token_id] = self.byte_table[token_id]
            self._tables[kept] = table
        return self._tables[kept]

    @cached_property
    def _tokens(self) -> list[str]:
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = token
        return tokens


def _panicked(error: BaseException) -> bool:
    """Return True if the library panicked, such as on a regular expression that takes too long; no `Exception`."""
    return type(error).__name__ == "PanicException"


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build the tokenizer of a checkpoint; `ModelError` if there is none, it is damaged or of an unknown kind."""
    source = checkpoint.tokenizer
    if isinstance(source, JsonTokenizerSource):
        return _from_json(source)
    from fd_core.text.ggml_tokenizer import build

    backend, decoding = build(source)
    size = backend.get_vocab_size()
    bos, eos = (source.metadata.get(f"{kind}_token_id") for kind in ("bos", "eos"))
    return Tokenizer(
        backend=backend,
        decoding=decoding,
        bos_id=bos if isinstance(bos, int) and 0 <= bos < size else None,
        eos_id=eos if isinstance(eos, int) and 0 <= eos < size else None,
        chat_template=source.chat_template,
        named_templates=source.named_templates,
    )


def _from_json(source: JsonTokenizerSource) -> Tokenizer:
    description = parse_json_object(source.content, str(source.origin))
    model = description.get("model")
    kind = model.get("type") if isinstance(model, Mapping) else None
    decoder = description.get("decoder")
    decoding = decoding_of(decoder)
    if isinstance(model, Mapping) and kind == "WordPiece":
        prefix = decoder.get("prefix") if isinstance(decoder, Mapping) else model.get("continuing_subword_prefix")
        decoding = Decoding(word_piece(str(prefix or "##")), drops_first_space=True)
    if decoding is None:
        raise ModelError(
            f"{source.origin}: its decoder is neither byte-level nor SentencePiece-style, or replaces more than "
            "spaces, and its model no WordPiece",
            field="tokenizer",
        )
    try:
        backend = tokenizers.Tokenizer.from_buffer(source.content)
    except BaseException as error:  # the library has no exception type for files that it cannot read
        if not isinstance(error, Exception) and not _panicked(error):
            raise
        raise ModelError(f"{source.origin} is not a valid tokenizer: {str(error)[:300]}", field="tokenizer") from error
    if added := list(_missing_tokens(backend, source.settings)):
        backend.add_tokens(added)
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest > _HOLES * backend.get_vocab_size() + _FEW_IDS:
        raise ModelError(
            f"{source.origin} has a token with id {highest}, but only {backend.get_vocab_size()} tokens",
            field="tokenizer",
        )
    # The engine checks the length of a request; a limit in the file would truncate silently.
    backend.no_truncation()
    backend.no_padding()
    if source.lowercase:
        given = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *given])
    return Tokenizer(
        backend=backend,
        decoding=decoding,
        bos_id=_named_id(backend, source.settings.get("bos_token")),
        eos_id=_named_id(backend, source.settings.get("eos_token")),
        chat_template=source.chat_template,
        named_templates=source.named_templates,
    )


def _missing_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens that settings add to tokenizer.json, in the order in which `transformers` adds them.

    `added_tokens_decoder` also changes how tokens of the file are matched; other tokens are added only if the file
    lacks them.
    """
    there = backend.get_added_tokens_decoder().values()
    known, texts = {repr(token) for token in there}, {token.content for token in there}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    order = {name: index for index, name in enumerate(_NAMED)}
    named = sorted((name for name in settings if name.endswith("_token")), key=lambda name: order.get(name, len(order)))
    specials = [settings[name] for name in named] + (list(extra.values()) if isinstance(extra, dict) else [])
    special_texts = {token_text(each) for each in specials}
    decoder = settings.get("added_tokens_decoder")
    listed = decoder.items() if isinstance(decoder, dict) else ()
    for _, given in sorted(
        ((int(index), token) for index, token in listed if str(index).isdecimal()), key=itemgetter(0)
    ):
        token = _added_token(given, special=token_text(given) in special_texts)
        if token is not None and repr(_added_token(given)) not in known:
            texts.add(token.content)
            yield token
    others = [(each, isinstance(each, str)) for each in (extra if isinstance(extra, list) else ())]
    for given, special in (*((each, True) for each in specials), *others):
        token = _added_token(given, special)
        if token is not None and token.content not in texts:
            texts.add(token.content)
            yield token


def _shares(sizes: Sequence[int], room: int) -> Sequence[int]:
    """Return the tokens that each of one or two texts keeps of `room`; the longer one is reduced first."""
    if len(sizes) == 1:
        return [room]
    short = min(*sizes, room // 2)
    return (short, room - short) if sizes[0] <= sizes[1] else (room - short, short)


def _added_token(given: Any, special: bool = False) -> tokenizers.AddedToken | None:
    """Return a token that settings give as a text or as an object; it is special if either declares it so."""
    text = token_text(given)
    if not text:
        return None
    flags = (
        {name: given[name] for name in _FLAGS if isinstance(given.get(name), bool)} if isinstance(given, dict) else {}
    )
    normalized = {} if "normalized" in flags else {"normalized": not flags.get("special", isinstance(given, str))}
    return tokenizers.AddedToken(text, **flags | normalized | {"special": special or flags.get("special", False)})


def _named_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """Look up a token that tokenizer_config.json gives as a string or as an object with `content`."""
    text = token_text(token)
    found: int | None = None if text is None else backend.token_to_id(text)
    return found


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Decoding:
    """Conversion of tokens to bytes, so that text can be decoded token by token.

    `to_bytes` is `byte_level`, or a function that `sentencepiece` or `word_piece` returns. If `drops_first_space`, the
    space that the encoder put before the first word is removed from decoded texts.
    """

    to_bytes: Callable[[str], bytes]
    drops_first_space: bool = False


_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = sorted({*range(256)}.difference(_VISIBLE))
_ALPHABET = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
"""GPT-2's printable stand-ins: visible Latin-1 stands for itself, the rest is moved above U+0100."""


def byte_level(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet; one with other characters stands for its own UTF-8."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


@cache
def sentencepiece(space: str) -> Callable[[str], bytes]:
    """Return the decoder of SentencePiece-style tokens: `space` is a space, `<0xAB>` a byte that has no token."""

    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte.group(1), 16)])
        return token.replace(space, " ").encode("utf-8", "replace")

    return to_bytes


@cache
def word_piece(prefix: str) -> Callable[[str], bytes]:
    """Return the decoder of WordPiece tokens: `prefix` continues a word, other tokens follow a space."""
    return lambda token: (token[len(prefix) :] if token.startswith(prefix) else f" {token}").encode("utf-8", "replace")


def decoding_of(decoder: Any) -> Decoding | None:
    """Read the family from the `decoder` of a tokenizer.json; None if it is neither, or replaces more than a space."""
    if not isinstance(decoder, Mapping):
        return None
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list):
        return None
    kinds = {str(step.get("type")): step for step in steps if isinstance(step, Mapping)}
    replaced = [step for step in steps if isinstance(step, Mapping) and step.get("type") == "Replace"]
    if "ByteLevel" in kinds:
        return None if replaced else Decoding(byte_level)
    if metaspace := kinds.get("Metaspace"):
        spaces = sentencepiece(str(metaspace.get("replacement", _SPACE)))
        drops = metaspace.get("prepend_scheme", "always") != "never"
        return None if replaced else Decoding(spaces, drops_first_space=drops)
    if "ByteFallback" in kinds:
        match replaced or [{"pattern": {"String": _SPACE}, "content": " "}]:
            case [{"pattern": {"String": str(space)}, "content": " "}] if space:
                return Decoding(sentencepiece(space), drops_first_space=bool(kinds.get("Strip", {}).get("start")))
    return None


END_ID = 256
_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of the null model: ids 0 to 255 stand for the bytes, 256 ends a text."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(_END, special=True)])
    return Tokenizer(backend=backend, decoding=Decoding(byte_level), eos_id=END_ID, chat_template=_TEMPLATE)
