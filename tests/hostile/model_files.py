"""Malformed model files from a seed: GGUF files and Hugging Face folders that are damaged or forged."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fd_core.models.families.installed import installed_families
from fd_core.testing.models.checkpoints import CASES, write_checkpoint
from fd_core.text.tokenizer import byte_tokenizer

__all__ = ["gguf_file", "model_folder", "whole_folder"]

NESTED: Any = 0
for _ in range(400):
    NESTED = [NESTED]
HOSTILE: tuple[Any, ...] = (
    *(0, -1, 1, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30, 10**400),
    *(0.5, -0.0, 1e308, 1e-320, math.nan, math.inf, True, None, "", "x" * 5000, "\0", "\ud800", [], {}, NESTED),
    *([1] * 1000, [2**62] * 8, ["a"] * 1000, {"a": {"a": {}}}, [None], [""]),
)
_ARCHITECTURES = sorted(installed_families().gguf)
_U8, _U32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 0, 4, 6, 7, 8, 9, 10
_PACKED = {_U8: "B", _U32: "I", _F32: "f", _BOOL: "?", _U64: "Q"}


def gguf_file(seed: int) -> bytes:
    """Return the bytes of a GGUF file with one to four faults."""
    rng = random.Random(seed)
    made = _Gguf(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(made.ways)()
    content = bytearray(made.packed())
    if rng.random() < 0.3:
        rng.choice([_flip, _cut, _lengthen, _overwrite])(rng, content)
    return bytes(content)


class _Gguf:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.architecture = rng.choice(_ARCHITECTURES)
        arch = self.architecture
        size = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
        size |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.sliding_window": 8}
        size |= {"expert_count": 2 if "moe" in arch else 0, "expert_used_count": 1, "expert_feed_forward_length": 64}
        self.pairs: list[list[Any]] = [["general.architecture", _STRING, arch]]
        self.pairs += [[f"{arch}.{key}", _U32, value] for key, value in size.items()]
        self.pairs += [[f"{arch}.attention.layer_norm_rms_epsilon", _F32, 1e-5], [f"{arch}.rope.freq_base", _F32, 1e4]]
        spm = rng.random() < 0.5
        tokens = ["<unk>", "<s>", "</s>", *(chr(97 + n) for n in range(20)), "ab", "abc", "\u2581a", *"0123456789"]
        tokens += [f"<0x{n:02X}>" for n in range(48 - len(tokens))]
        types = [2, 3, 3] + [1] * 45
        self.pairs += [["tokenizer.ggml.model", _STRING, "llama" if spm else "gpt2"]]
        self.pairs += [["tokenizer.ggml.tokens", _ARRAY, (_STRING, tokens)]]
        self.pairs += [["tokenizer.ggml.token_type", _ARRAY, (_U32, types)]]
        self.pairs += [["tokenizer.ggml.scores", _ARRAY, (_F32, [-float(n) for n in range(48)])]]
        self.pairs += [
            ["tokenizer.ggml.merges", _ARRAY, (_STRING, ["a b", "ab c"])],
            ["tokenizer.ggml.pre", _STRING, "gpt-2"],
        ]
        self.pairs += [[f"tokenizer.ggml.{kind}_token_id", _U32, n] for n, kind in enumerate(("bos", "eos"), 1)]
        self.pairs += [
            ["tokenizer.ggml.add_space_prefix", _BOOL, True],
            ["tokenizer.chat_template", _STRING, "{{ messages }}"],
        ]
        self.tensors: list[list[Any]] = [["token_embd.weight", [32, 48], 0], ["output_norm.weight", [32], 0]]
        for layer in range(2):
            shapes = {"attn_norm": [32], "attn_q": [32, 32], "attn_k": [32, 16], "attn_v": [32, 16], "ffn_norm": [32]}
            shapes |= {"attn_output": [32, 32], "ffn_gate": [32, 64], "ffn_up": [32, 64], "ffn_down": [64, 32]}
            if arch in ("qwen3", "qwen3moe", "gemma3"):
                shapes |= {"attn_q_norm": [8], "attn_k_norm": [8]}
            if arch == "qwen2":
                for part, rows in (("q", 32), ("k", 16), ("v", 16)):
                    self.tensors.append([f"blk.{layer}.attn_{part}.bias", [rows], 0])
            if arch == "gemma3":
                shapes |= {"post_attention_norm": [32], "post_ffw_norm": [32]}
            if arch == "qwen3moe":
                for part in ("gate", "up", "down"):
                    rows = shapes.pop(f"ffn_{part}")
                    shapes[f"ffn_{part}_exps"] = [*rows, 2]
                shapes["ffn_gate_inp"] = [32, 2]
            self.tensors += [[f"blk.{layer}.{name}.weight", dims, 0] for name, dims in shapes.items()]
        self.offsets: dict[int, int] = {}
        self.counts = [0, 0]
        self.version = 3
        self.ways: list[Callable[[], None]] = [
            *([self.number] * 6, [self.retyped], [self.listed] * 3, [self.shaped] * 3, [self.moved] * 2, [self.typed]),
            *([self.counted], [self.twice], [self.dropped], [self.renamed], [self.text] * 2, [self.versioned]),
        ]  # type: ignore[list-item]
        self.ways = [way for ways in self.ways for way in (ways if isinstance(ways, list) else [ways])]

    def number(self) -> None:
        """Set a shape or an id to an impossible number."""
        pair = self.rng.choice([pair for pair in self.pairs if pair[1] in (_U32, _F32)])
        if pair[1] == _F32 and self.rng.random() < 0.8:
            pair[2] = self.rng.choice([math.nan, math.inf, -1.0, 0.0, 1e-38, 3e38, 1.0])
        else:
            kind = self.rng.choice([_U32, _U64])
            value = self.rng.choice([0, 1, 7, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
            pair[1:] = [kind, value + (self.rng.choice([0, 2**62]) if kind == _U64 else 0)]

    def retyped(self) -> None:
        pair = self.rng.choice(self.pairs)
        kind = self.rng.choice([_U8, _BOOL, _STRING, _F32, _ARRAY])
        pair[1:] = [kind, {_STRING: "7", _ARRAY: (_U8, [1, 2])}.get(kind, 1)]

    def listed(self) -> None:
        """Make a tokenizer list too long, too short, nested, of another type or full of impossible values."""
        pair = self.rng.choice([pair for pair in self.pairs if pair[1] == _ARRAY] or self.pairs)
        if not isinstance(pair[2], tuple):
            return
        kind, values = pair[2]
        values = list(values)
        way = self.rng.randrange(8)
        if way == 0:
            values = values[: self.rng.randrange(len(values) + 1)]
        elif way == 1:
            values = values * self.rng.choice([2, 1000])
        elif way == 2:
            pair[2] = (_ARRAY, [(_U8, [1])] * 3)
            return
        elif way == 3:
            pair[2] = (kind, values, self.rng.choice([2**20, 2**32, 2**40, 2**63, 2**64 - 1]))
            return
        elif way == 4:
            kind, values = self.rng.choice(
                [(_U8, [255] * 48), (_BOOL, [True] * 48), (_F32, [math.nan] * 48), (_STRING, [])]
            )
        elif not values:
            return
        elif kind == _STRING:
            odd = [
                "",
                " ",
                "a" * 20_000,
                "ab" * 1000,
                "\u2581" * 500,
                "<0xZZ>",
                "<|im_end|>",
                "\U0010ffff",
                "a b c",
                "\0",
            ]
            for _ in range(self.rng.randint(1, 5)):
                values[self.rng.randrange(len(values))] = self.rng.choice(odd) + self.rng.choice(
                    ["", str(self.rng.random())]
                )
        else:
            values[self.rng.randrange(len(values))] = self.rng.choice([0, 1, 2, 3, 4, 5, 6, 255])
        pair[2] = (kind, values)

    def shaped(self) -> None:
        tensor = self.rng.choice(self.tensors)
        dims = self.rng.choice([1, 2, 2, 3, 4, 5, 0, 2**31])
        value = lambda: self.rng.choice([0, 1, 2, 31, 32, 33, 256, 2**20, 2**31, 2**32, 2**61, 2**63, 2**64 - 1])  # noqa: E731
        tensor[1] = [value() for _ in range(dims)] if dims < 6 else dims

    def moved(self) -> None:
        at = self.rng.randrange(len(self.tensors))
        self.offsets[at] = self.rng.choice([0, 1, 31, 32, 4096, 2**20, 2**40, 2**63, 2**64 - 32, 2**64 - 1])

    def typed(self) -> None:
        self.rng.choice(self.tensors)[2] = self.rng.choice([1, 2, 3, 6, 8, 12, 14, 24, 30, 39, 77, 2**31, 2**32 - 1])

    def counted(self) -> None:
        self.counts[self.rng.randrange(2)] = self.rng.choice([1, -1, 1000, 2**32, 2**62, 2**63])

    def twice(self) -> None:
        if self.rng.random() < 0.5:
            self.pairs.append(list(self.rng.choice(self.pairs)))
        else:
            self.tensors.append(list(self.rng.choice(self.tensors)))

    def dropped(self) -> None:
        among: list[Any] = self.pairs if self.rng.random() < 0.5 else self.tensors
        if len(among) > 1:
            among.pop(self.rng.randrange(len(among)))

    def renamed(self) -> None:
        names = [
            "",
            "\0",
            "x" * 100_000,
            "blk.99999.attn_q.weight",
            "blk.0.attn_q.bias",
            "rope_freqs.weight",
            "output.weight",
        ]
        among: list[Any] = self.pairs if self.rng.random() < 0.3 else self.tensors
        self.rng.choice(among)[0] = self.rng.choice(names)

    def text(self) -> None:
        pair = self.rng.choice([pair for pair in self.pairs if pair[1] == _STRING])
        pair[2] = self.rng.choice(
            [*_ARCHITECTURES, "mamba", "", "x" * 100_000, "{% for i in range(99999) %}" * 3, "default", "yarn"]
        )

    def versioned(self) -> None:
        self.version = self.rng.choice([0, 1, 2, 4, 2**31, 3 << 24])
        self.pairs.append(
            [f"{self.architecture}.rope.scaling.type", _STRING, self.rng.choice(["yarn", "linear", "none", "x"])]
        )
        self.pairs.append([f"{self.architecture}.rope.scaling.factor", _F32, self.rng.choice([0.0, 1e-30, 8.0, 3e38])])

    def packed(self) -> bytes:
        out = [b"GGUF", struct.pack("<I", self.version)]
        out.append(_u64(len(self.tensors) + self.counts[0]) + _u64(len(self.pairs) + self.counts[1]))
        for key, kind, value in self.pairs:
            out.append(_text(key) + struct.pack("<I", kind) + self._value(kind, value))
        offset, ends = 0, []
        for index, (name, dims, kind) in enumerate(self.tensors):
            given = dims if isinstance(dims, list) else [1]
            out.append(_text(name) + struct.pack("<I", len(given) if isinstance(dims, list) else dims))
            out.append(b"".join(map(_u64, given)) + struct.pack("<I", kind) + _u64(self.offsets.get(index, offset)))
            offset += -(-min(math.prod(given), 1 << 16) * 4 // 32) * 32
            ends.append(offset)
        header = b"".join(out)
        return header + bytes(-len(header) % 32) + self.rng.randbytes(min(offset, 1 << 20))

    def _value(self, kind: int, value: Any) -> bytes:
        if kind == _STRING:
            return _text(value)
        if kind != _ARRAY:
            return struct.pack(f"<{_PACKED[kind]}", value if kind != _U8 else 1)
        inner, values, *lie = value
        body = b"".join(self._value(inner, each) if inner != _F32 else _float(each) for each in values)
        return struct.pack("<I", inner) + _u64(lie[0] if lie else len(values)) + body


def _float(value: float) -> bytes:
    return struct.pack("<f", value)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value % 2**64)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _u64(len(encoded)) + encoded


def model_folder(seed: int, folder: Path) -> None:
    """Write a Hugging Face folder with one to four faults."""
    rng = random.Random(seed)
    files = dict(whole_folder(rng.choice(tuple(CASES))))
    if rng.random() < 0.2:
        _shard(rng, files)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(list(files))
        if name.endswith(".json") and rng.random() < 0.85:
            with contextlib.suppress(ValueError):  # already damaged
                files[name] = _written(_forged(rng, json.loads(files[name])))
        elif name.endswith(".safetensors") and rng.random() < 0.85 and len(files[name]) > 8:
            files[name] = _forged_safetensors(rng, files[name])
        elif rng.random() < 0.1:
            del files[name]
        else:
            content = bytearray(files[name])
            rng.choice([_flip, _cut, _lengthen, _overwrite])(rng, content)
            files[name] = bytes(content)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@cache
def whole_folder(case: str) -> dict[str, bytes]:
    """Return the files of an intact folder by name."""
    with tempfile.TemporaryDirectory() as made:
        folder = write_checkpoint(case, Path(made))
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["tokenizer.json"] = byte_tokenizer().backend.to_str().encode()
    files["tokenizer_config.json"] = _written(
        {"bos_token": {"content": "a"}, "eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    )
    files["generation_config.json"] = _written({"eos_token_id": [1, 2]})
    listed = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "."}]
    files["modules.json"] = _written(listed)
    config = json.loads(files["config.json"]) | {"pooling_mode": "mean"}
    files["config.json"] = _written(config)
    return files


def _shard(rng: random.Random, files: dict[str, bytes]) -> None:
    content = files.pop("model.safetensors")
    names = list(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))
    files["model-1.safetensors"] = content
    files["model.safetensors.index.json"] = _written(
        {"weight_map": {name: "model-1.safetensors" for name in names if name != "__metadata__"}}
    )


def _forged_safetensors(rng: random.Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 8 or rng.random() < 0.1:
        return _u64(rng.choice([0, 1, 8, 100_000_000, 2**32, 2**63, 2**64 - 1])) + content[8:]
    try:
        header = json.loads(content[8 : 8 + length])
    except ValueError:
        return content
    if not isinstance(header, dict) or not header:
        return content
    entry = header[rng.choice(list(header))]
    way = rng.randrange(6)
    if not isinstance(entry, dict) or "shape" not in entry or not isinstance(entry["shape"], list):
        way = 5
    if way == 0:
        entry["dtype"] = rng.choice(["F64", "F16", "BF16", "I8", "F8_E4M3", "F4", "BOOL", "x" * 5000, "", 3, None])
    elif way == 1:
        entry["shape"] = rng.choice(
            [[], [0], [2**63, 0], [2**62, 4], [-1], [1] * 9, [2**40], entry["shape"][::-1], "3", [1.5]]
        )
    elif way == 2:
        entry["data_offsets"] = rng.choice(
            [[0, 0], [0, 2**63], [2**64 - 1, 0], [4, 2], [0], [-4, 0], [0, 4, 8], "0", [0.5, 1]]
        )
    elif way == 3:
        header[rng.choice(["x" * 200_000, "", "\0", "model.layers.9.x"])] = entry
    elif way == 4:
        header.pop(rng.choice(list(header)))
    else:
        header = _forged(rng, header)
    packed = _written(header)
    return _u64(len(packed)) + packed + content[8 + length :]


def _forged(rng: random.Random, value: Any) -> Any:
    """Put a hostile value at a random position of a JSON value."""
    node: Any = value
    while True:
        inside: list[Any] = [*node] if isinstance(node, dict) else [*range(len(node))]
        if not inside:
            return rng.choice(HOSTILE)
        key = rng.choice(inside)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
            node = node[key]
            continue
        way = rng.random()
        if way < 0.1 and isinstance(node, dict):
            del node[key]
        elif way < 0.2 and isinstance(node, dict):
            node[
                rng.choice(["x" * 50_000, "", "num_experts", "rope_scaling", "layer_types", "quantization_config"])
            ] = rng.choice(HOSTILE)
        else:
            node[key] = rng.choice(HOSTILE)
        return value


def _written(value: Any) -> bytes:
    return json.dumps(value).encode()


def _flip(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.randint(1, 8)):
        if content:
            content[rng.randrange(min(len(content), rng.choice([64, 4096, 1 << 30])))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content) + 1) :]


def _lengthen(rng: random.Random, content: bytearray) -> None:
    content += rng.randbytes(rng.randint(1, 5000))


def _overwrite(rng: random.Random, content: bytearray) -> None:
    if len(content) > 16:
        at = rng.randrange(len(content) - 8)
        content[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x7f" * 8, b"[" * 8, b'"' * 8])
