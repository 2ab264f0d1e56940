"""A tokenizer built from GGUF metadata.

The metadata holds vocabulary, merges or scores and token types; how text is split before the merges is only a name
(`tokenizer.ggml.pre`), so the splits that belong to the names are written here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fd_core.errors import ModelError
from fd_core.models.loading.tokenizer_source import GgmlTokenizerSource
from fd_core.text.tokenizer import Decoding, byte_level, sentencepiece

log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_MAX_MERGED_CHARS = 1024
_MERGES_A_TOKEN = 64

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CLITICS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}"
_QWEN2 = rf"{_CLITICS}|{_WORDS}|\p{{N}}|{_SIGNS}"
_SEED = rf"{_CLITICS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TITLE, _CAPITALS = (rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]{each}" for each in (f"*[{_LOWER}]+", f"+[{_LOWER}]*"))
_TEKKEN = rf"{_TITLE}|{_CAPITALS}|\p{{N}}|{_PATHS}"
_GPT4O = rf"{_TITLE}{_CLITICS}?|{_CAPITALS}{_CLITICS}?|\p{{N}}{{1,3}}|{_PATHS}"
_HUNYUAN = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN35 = _QWEN2.replace(_WORDS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_KIMI_TITLE, _KIMI_CAPITALS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]{each}"
    for each in (rf"*[{_LOWER}&&[^\p{{Han}}]]+", rf"+[{_LOWER}&&[^\p{{Han}}]]*")
)
_KIMI = rf"\p{{Han}}+|{_KIMI_TITLE}{_CLITICS}?|{_KIMI_CAPITALS}{_CLITICS}?|\p{{N}}{{1,3}}|{_SIGNS}"
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (*_DEEPSEEK[:1], r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK[4], r"\p{N}")
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class _Pre:
    """Pre-tokenization: how text is split before merging, and further steps of the original tokenizer."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    """A word that is a token is used whole, regardless of the merges (`ignore_merges`)."""
    adds_bos: bool = False


_DIGITS = _Pre((r"\p{N}", _GPT2))
_QWEN = _Pre((_QWEN2,), nfc=True)
_LLAMA = _Pre((_LLAMA3,), whole_words=True, adds_bos=True)
_PRE: Mapping[str, _Pre] = {
    "default": _Pre(_UNNAMED),
    "gpt-2": _Pre((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    **dict.fromkeys(("falcon3", "falcon-h1", "lfm2", "pixtral"), _LLAMA),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": _Pre((_QWEN35,), nfc=True),
    "deepseek-llm": _Pre(_DEEPSEEK),
    "deepseek-coder": _Pre(_DEEPSEEK_CODER),
    "kimi-k2": _Pre((_KIMI,)),
    **dict.fromkeys(("command-r", "exaone"), _DIGITS),
    **dict.fromkeys(("exaone4", "olmo"), _Pre((_GPT2,))),
    **dict.fromkeys(("hunyuan", "stablelm2"), _Pre((_QWEN2,))),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "glm4", "smaug-bpe"), _Pre((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Pre((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _Pre(_HUNYUAN)),
    "seed-coder": _Pre((_SEED,)),
    "tekken": _Pre((_TEKKEN,), whole_words=True, adds_bos=True),
}


def build(source: GgmlTokenizerSource) -> tuple[Tokenizer, Decoding]:
    """Build the tokenizer; `ModelError` for an unknown kind or inconsistent metadata."""
    metadata = _Metadata(source)
    kind = metadata.values.get("model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata)
    raise metadata.wrong("model", f"is {kind!r}; expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")


class _Metadata:
    def __init__(self, source: GgmlTokenizerSource) -> None:
        self.origin = source.origin
        self.values = source.metadata
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise self.wrong("tokens", "is missing")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self.wrong("tokens", "has duplicates")
        self.types: list[int] = self._list("token_type", int) or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.wrong("token_type", f"has {len(self.types)} entries for {len(self.tokens)} tokens")

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for line in self._list("merges", str):
            # the first character may itself be a space in vocabularies that keep spaces
            head, gap, right = line[1:].partition(" ")
            left = line[:1] + head
            if not gap or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self.wrong("merges", f"has the entry {line[:60]!r}, whose parts are not in the vocabulary")
            pairs.append((left, right))
        return pairs

    def scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self.wrong("scores", f"has {len(scores)} entries for {len(self.tokens)} tokens")
        if not all(map(math.isfinite, scores)):
            raise self.wrong("scores", "has an entry that is not finite")
        return scores

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {str(value)[:40]!r}")
        return value

    def token(self, key: str) -> str | None:
        index = self.values.get(key)
        if isinstance(index, int) and 0 <= index < len(self.tokens):
            return self.tokens[index]
        return None

    def wrong(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.origin}: tokenizer.ggml.{key} {what}", field="tokenizer")

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value[:1]):
            raise self.wrong(key, f"must be a list of {kind.__name__}")
        return value


def _byte_level(metadata: _Metadata) -> tuple[Tokenizer, Decoding]:
    pre = _pre(metadata)
    merges = metadata.merges()
    tokenizer = Tokenizer(models.BPE(vocab=metadata.ids, merges=merges, fuse_unk=False, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, metadata)
    _add_ends(tokenizer, metadata, bos=metadata.flag("add_bos_token", pre.adds_bos))
    return tokenizer, Decoding(byte_level)


def _pre(metadata: _Metadata) -> _Pre:
    name = metadata.values.get("pre", "default")
    pre = _PRE.get(name) if isinstance(name, str) else None
    if pre is None:
        raise metadata.wrong(
            "pre",
            f"is {str(name)[:60]!r}, an unknown pre-tokenizer; expected one of {', '.join(sorted(_PRE))}",
        )
    if name == "default":
        log.warning(
            "%s does not name its pre-tokenizer; the default one is used, so tokens may differ from those of training",
            metadata.origin,
        )
    return pre


def _sentencepiece(metadata: _Metadata) -> tuple[Tokenizer, Decoding]:
    prefixed = metadata.flag("add_space_prefix", True)
    unknown = next((metadata.tokens[i] for i, kind in enumerate(metadata.types) if kind == _UNKNOWN), None)
    merges, byte_fallback = _merges_from_scores(metadata), _BYTE in metadata.types
    tokenizer = Tokenizer(
        models.BPE(vocab=metadata.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    _add_tokens(tokenizer, metadata)
    _add_ends(tokenizer, metadata, bos=metadata.flag("add_bos_token", True))
    return tokenizer, Decoding(sentencepiece("▁"), drops_first_space=prefixed)


def _merges_from_scores(metadata: _Metadata) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's scores imply: the pair whose joined token scores best goes first."""
    scores = metadata.scores()
    ids = metadata.ids
    longest = max(map(len, metadata.tokens))
    if longest > _MAX_MERGED_CHARS:
        raise metadata.wrong(
            "tokens", f"has an entry of {longest} characters; the limit for merged tokens is {_MAX_MERGED_CHARS}"
        )
    normal = {token for token, kind in zip(metadata.tokens, metadata.types, strict=True) if kind == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in normal:
        rank = -scores[ids[token]]
        if len(ranked) > _MERGES_A_TOKEN * len(ids):
            raise metadata.wrong("scores", f"imply more than {_MERGES_A_TOKEN} merges per token")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((rank, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: _Metadata) -> None:
    """Register control tokens and those defined by the user, all at once: each call rebuilds the library's matcher."""
    control, defined = [], []
    for token, kind in zip(metadata.tokens, metadata.types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _add_ends(tokenizer: Tokenizer, metadata: _Metadata, bos: bool) -> None:
    first = metadata.token("bos_token_id") if bos else None
    last = metadata.token("eos_token_id") if metadata.flag("add_eos_token", False) else None
    if first is None and last is None:
        return
    ends = [token for token in (first, last) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([first] if first else []), "$A", *([last] if last else [])],
        special_tokens=[(token, metadata.ids[token]) for token in dict.fromkeys(ends)],
    )
