from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.errors import ModelError
from fd_core.models.loading.gguf_format import PACKED_TYPES
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import PackedTensor
from tests.models.loading.tiny_gguf import LLAMA, llama_tensors, write_gguf
from tests.models.paged import PagedDriver

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    extra = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(48)],
        "tokenizer.ggml.token_type": [1] * 47 + [3],
        "tokenizer.ggml.eos_token_id": 2,
    }
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", extra=extra)


def test_config_uses_hugging_face_keys(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 48,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_tensors_have_hugging_face_names_shapes_and_values(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    stored = llama_tensors()
    assert "model.layers.0.self_attn.q_proj.weight" in checkpoint.names()
    assert "lm_head.weight" not in checkpoint.names()
    assert checkpoint.shape("model.layers.0.mlp.down_proj.weight") == (32, 64)
    gate = checkpoint.read("model.layers.0.mlp.gate_proj.weight")
    np.testing.assert_array_equal(gate.data, stored["blk.0.ffn_gate.weight"])
    assert gate.dtype == "F32" and not gate.data.flags.owndata, "an unquantized tensor is mapped, not copied"


def test_q_and_k_rows_are_reordered_into_halves(tiny: Path) -> None:
    """The converter writes row pairs (i, i + half) of each head next to each other."""
    checkpoint = open_checkpoint(tiny)
    q = llama_tensors()["blk.0.attn_q.weight"]
    head = q[8:16]
    np.testing.assert_array_equal(
        checkpoint.read("model.layers.0.self_attn.q_proj.weight").data[8:16],
        np.concatenate([head[0::2], head[1::2]]),
    )


def _random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    block, size = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(1).integers(0, 60, (rows, columns // block * size), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["F16", "BF16", *PACKED_TYPES, "Q2_K", "Q3_K", "IQ4_NL"])
def test_stored_types_match_the_library(tmp_path: Path, kind: str) -> None:
    quantization = GGMLQuantizationType[kind]
    packed = _random_blocks(quantization, 64, 256)
    if kind == "F16":
        packed = packed.view(np.float16)
    values = {**LLAMA, "embedding_length": 256, "rope.dimension_count": 64}
    tensors = {"token_embd.weight": np.zeros((48, 256), np.float32), "blk.0.ffn_gate.weight": (packed, quantization)}
    path = write_gguf(tmp_path / "m.gguf", values=values, tensors=tensors)
    found = open_checkpoint(path).read("model.layers.0.mlp.gate_proj.weight")
    assert found.dtype == (kind if kind in ("F16", "BF16") else "F32")
    assert found.shape == (64, 256)
    np.testing.assert_array_equal(found.to_float32(), gguf.quants.dequantize(packed, quantization))


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    packed = _random_blocks(GGMLQuantizationType.Q8_K, 64, 256)
    tensors = {
        "token_embd.weight": np.zeros((48, 32), np.float32),
        "blk.0.ffn_gate.weight": (packed, GGMLQuantizationType.Q8_K),
    }
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_gate\.weight' is stored as Q8_K.*Q4_K"):
        open_checkpoint(path)


def test_weight_stays_quantized_for_packs_supporting_it(tmp_path: Path) -> None:
    """Rows of q are reordered as well; packs without the format get the library's dequantized values."""
    stored = gguf.quants.quantize(llama_tensors()["blk.0.attn_q.weight"], GGMLQuantizationType.Q4_0)
    tensors = {**llama_tensors(), "blk.0.attn_q.weight": (stored, GGMLQuantizationType.Q4_0)}
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors)) as checkpoint:
        packed, expanded = (checkpoint.read_weight(name, formats) for formats in ({"Q4_0"}, {"Q8_0"}))
        assert checkpoint.stored_format(name) == "Q4_0"
    assert isinstance(packed, PackedTensor) and packed.group == 32 and not isinstance(expanded, PackedTensor)
    values = gguf.quants.dequantize(stored, GGMLQuantizationType.Q4_0).reshape(4, 4, 2, 32).swapaxes(1, 2)
    np.testing.assert_array_equal(packed.to_float32(), values.reshape(32, 32))
    np.testing.assert_array_equal(expanded.to_float32(), values.reshape(32, 32))


def test_each_expert_is_a_slice_of_the_stack(tmp_path: Path) -> None:
    weights = np.random.default_rng(2).standard_normal((3, 64, 32)).astype(np.float32)
    stored = gguf.quants.quantize(weights, GGMLQuantizationType.Q8_0)
    tensors = {**llama_tensors(), "blk.0.ffn_gate_exps.weight": (stored, GGMLQuantizationType.Q8_0)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors)) as checkpoint:
        found = checkpoint.read_weight("model.layers.0.block_sparse_moe.experts.1.w1.weight", {"Q8_0"})
    assert isinstance(found, PackedTensor)
    np.testing.assert_array_equal(found.to_float32(), gguf.quants.dequantize(stored, GGMLQuantizationType.Q8_0)[1])


def test_experts_of_old_files_are_stored_one_by_one(tmp_path: Path) -> None:
    weights = np.random.default_rng(2).standard_normal((3, 64, 32)).astype(np.float32)
    experts = {f"blk.0.ffn_up.{index}.weight": each for index, each in enumerate(weights)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors={**llama_tensors(), **experts})) as checkpoint:
        for index, each in enumerate(weights):
            found = checkpoint.read(f"model.layers.0.block_sparse_moe.experts.{index}.w3.weight").to_float32()
            np.testing.assert_array_equal(found, each)


@pytest.mark.parametrize("arch", ["glm4moe", "llama", "cohere2"])
def test_block_for_multi_token_prediction_is_no_layer_of_the_model(tmp_path: Path, arch: str) -> None:
    values = {**LLAMA, "block_count": 2, "nextn_predict_layers": 1, "leading_dense_block_count": 1}
    if arch == "glm4moe":
        values |= {
            "expert_count": 2,
            "expert_used_count": 1,
            "expert_shared_count": 1,
            "expert_feed_forward_length": 64,
        }
    if arch == "cohere2":
        values |= {"logit_scale": 1.0, "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]}
    predicting = {f"blk.1.{name}.weight": np.zeros(32, np.float32) for name in ("attn_norm", "nextn.enorm")}
    path = write_gguf(tmp_path / "m.gguf", arch=arch, values=values, tensors=llama_tensors() | predicting)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == len(checkpoint.config.get("layer_types", [0])) == 1
        found = [name.removeprefix("model.layers.1.") for name in checkpoint.names() if ".layers.1." in name]
        assert found == (["input_layernorm.weight", "enorm.weight"] if arch == "glm4moe" else [])


def test_a_file_of_layers_for_multi_token_prediction_alone_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", values={**LLAMA, "nextn_predict_layers": 1}, tensors=llama_tensors())
    with pytest.raises(ModelError, match="1 of 1 blocks are for multi-token prediction"):
        open_checkpoint(path)


def test_index_after_other_tensors_is_unknown(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "blk.0.attn_q.1.weight": np.zeros((32, 32), np.float32)}
    with pytest.raises(ModelError, match=r"attn_q\.1\.weight"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_chatglm_file_with_stacked_queries_is_the_model_with_separate_ones(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["blk.0.ffn_up.weight"] = np.concatenate(
        [tensors.pop("blk.0.ffn_gate.weight"), tensors["blk.0.ffn_up.weight"]]
    )
    tensors |= {
        f"blk.0.attn_{part}.bias": np.arange(len(tensors[f"blk.0.attn_{part}.weight"]), dtype=np.float32)
        for part in "qkv"
    }
    parts = {kind: [tensors[f"blk.0.attn_{part}.{kind}"] for part in "qkv"] for kind in ("weight", "bias")}
    stacked = {name: values for name, values in tensors.items() if not re.search("attn_[qkv]\\.", name)}
    stacked |= {f"blk.0.attn_qkv.{kind}": np.concatenate(each) for kind, each in parts.items()}
    logits = []
    for name, each in (("separate", tensors), ("stacked", stacked)):
        path = write_gguf(
            tmp_path / f"{name}.gguf", arch="chatglm", values={**LLAMA, "rope.dimension_count": 4}, tensors=each
        )
        with open_checkpoint(path) as checkpoint:
            driver = PagedDriver(load_model(checkpoint, NumpyOps()), NumpyOps(), [[1, 2, 3, 4, 5]], 64)
        driver.generate(1)
        logits.append(np.stack(driver.rows[0].logits))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("kind", [*(kind for kind in PACKED_TYPES if kind != "MXFP4"), "Q3_K"])
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_non_finite_scales_are_rejected_by_name(tmp_path: Path, kind: str, damage: float) -> None:
    quantization = GGMLQuantizationType[kind]
    packed = _random_blocks(quantization, 64, 256)
    packed[7] = 0
    at = packed.shape[1] - 2 if kind in ("Q6_K", "Q3_K") else 0
    packed[7, at : at + 2] = np.frombuffer(np.float16(damage).tobytes(), np.uint8)
    values = {**LLAMA, "embedding_length": 256, "rope.dimension_count": 64}
    tensors = {"token_embd.weight": np.zeros((48, 256), np.float32), "blk.0.ffn_gate.weight": (packed, quantization)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", values=values, tensors=tensors))
    with pytest.raises(ModelError, match=rf"m\.gguf: tensor 'blk\.0\.ffn_gate\.weight' \({kind}\).*not finite"):
        checkpoint.read("model.layers.0.mlp.gate_proj.weight")


def test_duplicate_tensor_name_is_rejected(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "blk.00.attn_norm.weight": np.zeros(32, "f4")}
    with pytest.raises(ModelError, match="two tensors"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_unknown_tensor_is_rejected_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors={**llama_tensors(), "blk.0.attn_noise.weight": np.zeros(4, "f4")})
    with pytest.raises(ModelError, match=r"attn_noise"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("arch", "change", "extra", "message"),
    [
        ("mamba", {}, {}, "architecture 'mamba' is not supported"),
        ("llama", {"block_count": "two"}, {}, r"llama\.block_count must be a positive integer; found 'two'"),
        ("llama", {"block_count": 0}, {}, "block_count"),
        (
            "llama",
            {"attention.head_count_kv": [2, 2]},
            {},
            "head_count_kv must be an integer, or list one for each of 1",
        ),
        ("llama", {"attention.value_length": 4}, {}, "only equal values"),
        ("llama", {"rope.scaling.type": "longrope"}, {}, "'longrope' is not supported"),
        ("llama", {}, {"split.count": 3}, "split"),
        ("llama", {}, {"general.type": "mmproj"}, "mmproj"),
    ],
)
def test_unusable_metadata_is_named(
    tmp_path: Path, arch: str, change: dict[str, object], extra: dict[str, object], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch=arch, values={**LLAMA, **change}, extra=extra)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_rope_factors_of_another_length_are_rejected(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "rope_freqs.weight": np.ones(5, "f4")}
    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' has no usable form"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_end_of_turn_tokens_are_found_among_control_tokens(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.tokens": ["a", "<eos>", "<end_of_turn>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 1,
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", extra=extra))
    assert checkpoint.eos_token_ids == (1, 2), "a normal token that looks like an end is not one"


def test_digest_follows_weights_and_metadata(tmp_path: Path) -> None:
    first = open_checkpoint(write_gguf(tmp_path / "a.gguf")).digest
    assert open_checkpoint(write_gguf(tmp_path / "b.gguf")).digest == first
    tensors = llama_tensors()
    tensors["blk.0.ffn_norm.weight"][3] += 1
    assert open_checkpoint(write_gguf(tmp_path / "c.gguf", tensors=tensors)).digest != first
    values = {**LLAMA, "rope.freq_base": 20000.0}
    assert open_checkpoint(write_gguf(tmp_path / "d.gguf", values=values)).digest != first


def _open_and_read(path: Path) -> None:
    """Open and read everything; only `ModelError` is caught."""
    try:
        with open_checkpoint(path) as checkpoint:
            for name in checkpoint.names():
                checkpoint.read(name)
            _ = checkpoint.eos_token_ids, checkpoint.digest, checkpoint.tokenizer
    except ModelError as error:
        assert path.name in str(error), "the file is named"


def test_truncation_at_any_byte_names_the_file(tiny: Path, tmp_path: Path) -> None:
    content = tiny.read_bytes()
    header = content.index(llama_tensors()["token_embd.weight"].tobytes()[:16])
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, header, 7), *range(header, len(content), 509), len(content) - 32]:
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            open_checkpoint(cut)


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 2600), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_header_bits_raise_only_model_error(tiny: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(tiny.read_bytes())
    for position, bit in flips:
        content[position] ^= 1 << bit
    damaged = tiny.parent / "flipped.gguf"
    damaged.write_bytes(content)
    tracemalloc.start()
    try:
        _open_and_read(damaged)
        assert tracemalloc.get_traced_memory()[1] < 4 * MEGABYTE
    finally:
        tracemalloc.stop()


def _pair(key: str, kind: int, rest: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + rest


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<QQ", 2**63, 0),
        struct.pack("<QQ", 0, 2**63),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**62),
        struct.pack("<QQ", 0, 1) + _pair("k", 9, struct.pack("<IQ", 0, 2**63)),
        struct.pack("<QQ", 0, 1) + _pair("k", 9, struct.pack("<IQ", 8, 2**40)),
        struct.pack("<QQ", 0, 1) + _pair("k", 9, struct.pack("<IQ", 9, 1) * 1000),
        struct.pack("<QQ", 0, 1) + _pair("k", 8, struct.pack("<Q", 2**64 - 1)),
        struct.pack("<QQ", 0, 1) + _pair("k", 8, struct.pack("<Q", 2) + b"\xff\xff"),
        struct.pack("<QQ", 0, 1) + _pair("general.alignment", 4, struct.pack("<I", 0)),
        struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I4QIQ", 4, *[2**63] * 4, 0, 0),
        struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 8, 0, 2**64 - 32),
        struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 8, 77, 0) + bytes(64),
        struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<II", 2**31, 0) + bytes(64),
        struct.pack("<QQ", 1, 0)
        + struct.pack("<Q", 1)
        + b"t"
        + struct.pack("<I3QIQ", 3, 0, 1, 2**60, 0, 0)
        + bytes(64),
    ],
)
def test_hostile_counts_and_sizes_are_rejected_immediately(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"hostile\.gguf"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0"),
        (b"GGML" + bytes(64), "begin"),
        (b"GGUF\x01\0\0\0" + bytes(64), "version 1"),
        (b"GGUF\0\0\0\x03" + bytes(64), "big-endian"),
    ],
)
def test_other_files_are_not_read_as_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "named.gguf", "llama")
    writer.add_chat_template([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    extra = {key: each.value for key, each in writer.kv_data[0].items() if key.startswith("tokenizer.")}
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", extra=extra | tokens)).tokenizer
    assert (source.chat_template, dict(source.named_templates)) == ("D", {"tool_use": "T"})


def test_sampling_metadata_has_the_names_of_generation_config(tmp_path: Path) -> None:
    extra = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "general.sampling.penalty_repeat": 1.5}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", extra=extra))
    assert checkpoint.generation_config == {"temperature": 0.5, "top_k": 40, "repetition_penalty": 1.5}
