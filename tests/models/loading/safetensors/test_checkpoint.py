from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fd_core.errors import ModelError
from fd_core.models.opening import open_checkpoint
from fd_core.ops.weights import RawTensor

MEGABYTE = 1 << 20
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4}


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "model.embed_tokens.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "model.norm.weight": rng.standard_normal(4).astype(np.float16),
    }


def _folder(folder: Path, config: Mapping[str, Any] = CONFIG, tensors: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(_tensors() if tensors is None else tensors), folder / "model.safetensors")
    return folder


def _raw(header: object, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _folder(tmp_path / "model")


def test_tensors_are_mapped_views_of_the_file(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == sorted(_tensors())
    for name, expected in _tensors().items():
        found = checkpoint.read(name)
        np.testing.assert_array_equal(found.data, expected)
        assert checkpoint.shape(name) == found.shape == expected.shape
        assert not found.data.flags.owndata and not found.data.flags.writeable
    assert checkpoint.config["hidden_size"] == 4
    assert checkpoint.total_bytes == 6 * 4 * 4 + 4 * 2


def test_view_outlives_its_checkpoint(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    view = checkpoint.read("model.norm.weight").data
    checkpoint.close()
    checkpoint.close()
    np.testing.assert_array_equal(view, _tensors()["model.norm.weight"])


def test_bfloat16_becomes_float32_exactly() -> None:
    values = np.array([0.0, -1.5, 3.140625, np.inf, 2.0**-130], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(RawTensor("BF16", bits).to_float32(), values)


def test_bfloat16_is_read_as_raw_bits(folder: Path) -> None:
    header = {"w": _entry(0, 4, [2], "BF16")}
    (folder / "model.safetensors").write_bytes(_raw(header, struct.pack("<2H", 0x3F80, 0xC000)))
    found = open_checkpoint(folder).read("w")
    assert found.dtype == "BF16"
    assert found.to_float32().tolist() == [1.0, -2.0]


def test_unaligned_buffer_is_read(folder: Path) -> None:
    header = json.dumps({"w": _entry(0, 4, [1])}).encode()
    header += b" " * (1 - len(header) % 4 if len(header) % 4 <= 1 else 5 - len(header) % 4)
    assert (8 + len(header)) % 4 == 1
    (folder / "model.safetensors").write_bytes(_raw(header, struct.pack("<f", 2.5)))
    data = open_checkpoint(folder).read("w").data
    assert data.tolist() == [2.5] and data.flags.aligned


def test_other_types_are_rejected_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_folder(tmp_path / "m", tensors={"w": np.zeros(3, np.int8)}))
    with pytest.raises(ModelError, match=r"tensor 'w' is stored as I8.*BF16"):
        checkpoint.read("w")


def test_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor 'lm_head\.weight'"):
        open_checkpoint(folder).read("lm_head.weight")


def _shard(folder: Path, weight_map: object) -> Path:
    (folder / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(_tensors().items(), 1):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


WHOLE = {"model.embed_tokens.weight": "model-1.safetensors", "model.norm.weight": "model-2.safetensors"}


def test_shards_are_read_through_their_index(folder: Path) -> None:
    checkpoint = open_checkpoint(_shard(folder, WHOLE))
    for name, expected in _tensors().items():
        np.testing.assert_array_equal(checkpoint.read(name).data, expected)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ({"w": "model-3.safetensors"}, r"model-3\.safetensors is missing"),
        ({"w": "model-1.safetensors"}, "expected tensor 'w' in"),
        ({"w": "../model-1.safetensors"}, "in the folder of the index"),
        ({"w": "/etc/passwd"}, "in the folder of the index"),
        ({"w": "..\\model.safetensors"}, "in the folder of the index"),
        ({"w": "model\0.safetensors"}, "in the folder of the index"),
        ({"w": "weights.bin"}, "in the folder of the index"),
        ({"w": 7}, "in the folder of the index"),
        ({"w": ".."}, "in the folder of the index"),
    ],
)
def test_inconsistent_index_is_rejected(folder: Path, weight_map: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(_shard(folder, weight_map))


def test_single_file_may_have_any_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "model.norm.weight" in open_checkpoint(folder).names()
    save_file({"w": np.zeros(1, "f4")}, folder / "other.safetensors")
    with pytest.raises(ModelError, match=r"other\.safetensors, weights\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickles_are_rejected_with_advice(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(b"\x80\x04")
    for target in (path, tmp_path):
        with pytest.raises(ModelError, match=r"pickled weights.*safetensors or GGUF"):
            open_checkpoint(target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"a": \xff}', "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'{"a":' * 100_000, "not a JSON object"),
        (b'{"quantization_config": {"quant_method": "bitsandbytes"}}', "'bitsandbytes' are not supported"),
    ],
)
def test_unusable_config_is_an_error(folder: Path, config: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(config)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        _raw(b""),
        _raw(b"[]"),
        _raw(b"\xff\xff"),
        _raw(b'{"w":' * 50_000),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 99_000_000) + b"{}",
        _raw({"w": 1}),
        _raw({"w": _entry(0, 4, [2])}, bytes(4)),
        _raw({"w": _entry(0, 2**60, [2**58])}),
        _raw({"w": _entry(0, 8, [2])}, bytes(4)),
        _raw({"w": _entry(4, 8, [1])}, bytes(8)),
        _raw({"w": _entry(0, 4, [1])}, bytes(8)),
        _raw({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, bytes(12)),
        _raw({"w": _entry(0, -4, [-1])}, bytes(4)),
        _raw({"w": _entry(0, 4, [1] * 9)}, bytes(4)),
        _raw({"w": _entry(0, 0, [0, 2**62, 2**62])}),
        _raw({"w": _entry(0, 4, [10**400])}, bytes(4)),
        _raw({"w": _entry(0, 4, [1], "F4")}, bytes(4)),
        _raw({"w": {"dtype": "F32", "shape": [1]}}, bytes(4)),
        _raw({"w": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}, bytes(6)),
    ],
)
def test_damaged_or_hostile_file_is_rejected_immediately(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            open_checkpoint(folder)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()


def test_truncation_at_any_byte_is_an_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            open_checkpoint(folder)


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 7)), min_size=1, max_size=3))
def test_flipped_header_bits_raise_only_model_error(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    folder = _folder(tmp_path_factory.getbasetemp() / "flipped")
    content = bytearray((folder / "model.safetensors").read_bytes())
    for position, bit in flips:
        content[position % len(content)] ^= 1 << bit
    (folder / "model.safetensors").write_bytes(content)
    tracemalloc.start()
    try:
        with open_checkpoint(folder) as checkpoint:
            for name in checkpoint.names():
                assert checkpoint.read(name).shape == checkpoint.shape(name)
    except ModelError as error:
        assert "model.safetensors" in str(error)
    finally:
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
        tracemalloc.stop()


def test_digest_follows_weights_and_config(tmp_path: Path) -> None:
    first = open_checkpoint(_folder(tmp_path / "a")).digest
    assert open_checkpoint(_folder(tmp_path / "b")).digest == first
    changed = _tensors()
    changed["model.norm.weight"][0] += 1
    assert open_checkpoint(_folder(tmp_path / "c", tensors=changed)).digest != first
    assert open_checkpoint(_folder(tmp_path / "d", {**CONFIG, "rope_theta": 5.0})).digest != first


def test_digest_of_large_file_covers_start_of_every_tensor(tmp_path: Path) -> None:
    tensors = {"big": np.zeros(10 << 20, np.float32), "small": np.zeros(8, np.float32)}
    first = open_checkpoint(_folder(tmp_path / "a", tensors=tensors)).digest
    tensors["small"][2] = 1
    assert open_checkpoint(_folder(tmp_path / "b", tensors=tensors)).digest != first


def test_generation_config_defines_eos_tokens(folder: Path) -> None:
    assert open_checkpoint(folder).eos_token_ids == ()
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8], "temperature": 0.6, "do_sample": true}')
    assert open_checkpoint(folder).eos_token_ids == (7, 8)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        _ = open_checkpoint(folder).eos_token_ids


def test_chat_template_is_found_in_any_location(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        _ = open_checkpoint(folder).tokenizer
    (folder / "tokenizer.json").write_text("{}")
    assert open_checkpoint(folder).tokenizer.chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(folder).tokenizer.chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert open_checkpoint(folder).tokenizer.chat_template == "J"


def test_non_model_path_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelError, match="no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match="not a model"):
        open_checkpoint(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF files: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_stacked_experts_are_read_as_published(tmp_path: Path) -> None:
    """Published files have them as [n, in, out], those that `transformers` saves as [n, out, in]."""
    rng, name = np.random.default_rng(0), "model.layers.0.mlp.experts"
    published = {
        f"{name}.gate_up_proj": rng.standard_normal((3, 4, 10)).astype(np.float32),
        f"{name}.down_proj": rng.standard_normal((3, 5, 4)).astype(np.float32),
    }
    saved = {each: np.ascontiguousarray(values.swapaxes(1, 2)) for each, values in published.items()}
    for folder, tensors in (("published", published), ("saved", saved)):
        with open_checkpoint(_folder(tmp_path / folder, tensors=tensors)) as checkpoint:
            for each, expected in published.items():
                assert checkpoint.shape(each) == expected.shape
                np.testing.assert_array_equal(checkpoint.read(each).data, expected)
