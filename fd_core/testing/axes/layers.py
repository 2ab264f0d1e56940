"""Axes of one layer: geometry, form of weights and KV, and the step that it computes; each case against numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from fd_core.config import DEFAULT_BLOCK_SIZE
from fd_core.models.families.installed import installed_families
from fd_core.models.families.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec
from fd_core.ops.contract import KV_TYPES, SCALE_BYTES, Activation, Ops, PlainActivation
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import WEIGHT_FORMATS
from fd_core.testing.axes.covering import Axis, Case, Value, around, int_of
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.axes.reuse import operation_part
from fd_core.testing.models.arrays import (
    KV_STEP,
    PACKED_TOLERANCE,
    TOLERANCE,
    TURNED,
    assert_near,
    but_for_a_step,
    float32_of,
    named,
    step_input,
)
from fd_core.testing.models.layers import Geometry, LayerOn, half_of, sizes_of_layer

ACTIVATIONS: Final = tuple(each for each in get_args(Activation) if each != "clamped_swiglu")
"""Those that every pack computes."""
_PRODUCTS: Final = ({"decodes": 65}, {"decodes": 193}, {"decodes": 2049, "group": 16, "head_dim": 8})
"""Steps of decodes alone; in the last one there are more than 2^16 pairs of rows and query heads."""
_HEADS_OF_FAMILIES: Final = sorted(
    {
        (defaults["num_key_value_heads"], defaults["head_dim"])
        for defaults in (family.defaults for family in installed_families().architectures.values())
        if {"num_key_value_heads", "head_dim"} <= defaults.keys()
    }
)
"""Numbers of KV heads and their elements that configs of families leave out, as most published models have them."""
AXES: Final = (
    Axis("decodes", (1, 0, 2, 15, 33, 64, 65, 129, 193, 257), ("StepInput.query_start",), _PRODUCTS),
    Axis(
        "chunk",
        (0, 1, 2, 16, 17, 128, 129, 601, 1030),
        ("StepInput.max_query",),
        rare=({"chunk": 2048}, {"chunk": 8300, "kv_heads": 1, "group": 1}),
    ),
    Axis("chunks", (1, 2, 5)),
    Axis("drafts", (0, 1, 3, 7, 16)),
    Axis(
        "context",
        (9, 1, *around(128), 1025, 4097, 16_385, 32_769),
        ("StepInput.context_len", "StepInput.max_context"),
        tuple(
            {"context": 131_073, "kv_heads": 1, "group": 1, "head_dim": 8, **rows}
            for rows in ({}, {"chunk": 17}, {"decodes": 0, "chunk": 129}, {"drafts": 3})
        ),
    ),
    Axis("shared_blocks", (0, 1, 20)),
    Axis("uniform", (False, True), ("StepInput.uniform",)),
    Axis(
        "host_copy",
        (False, True),
        ("StepInput.host", "HostStep.query_start", "HostStep.context_len", "HostStep.block_tables"),
    ),
    Axis(
        "kv_heads",
        (2, 1, 3, 5, 8),
        ("Heads.num_kv_heads", "KVShape.num_kv_heads"),
        rare=(
            *({"kv_heads": heads, "group": 1} for heads in (16, 32, 64)),
            {"kv_heads": 32, "group": 1, "kv_dtype": "int8", "decodes": 33},
            *(
                {"kv_heads": heads, "head_dim": d, "block_size": DEFAULT_BLOCK_SIZE, "kv_dtype": dtype, "drafts": 3}
                for heads, d in _HEADS_OF_FAMILIES
                for dtype in ("auto", *KV_TYPES)
            ),
        ),
    ),
    Axis(
        "group",
        (4, 1, 2, 3, 5, 6, 7, 8, 12, 16),
        ("Heads.num_heads",),
        rare=({"group": 71, "kv_heads": 1, "chunk": 17}, {"group": 48, "kv_heads": 1, "decodes": 33}),
    ),
    Axis(
        "head_dim",
        (16, 8, 10, 24, 32, 64, 80, 96, 128, 192, 256),
        ("Heads.head_dim", "KVShape.head_dim"),
        rare=({"head_dim": 112, "chunk": 17},),
    ),
    Axis("scale", (1.0, 0.5, 1.3), ("Heads.scale",)),
    Axis("hidden", (128, 38, 256, 1000), rare=({"hidden": 4104}, {"hidden": 8192})),
    Axis("inner", (128, 50, 260, 4104), rare=({"inner": 28_672},)),
    Axis(
        "block_size",
        (8, 1, 5, 16, 32, 64, 128),
        ("KVShape.block_size", "StepInput.block_tables"),
        rare=({"block_size": 4096},),
    ),
    Axis(
        "spare_blocks",
        (0, 1, 999),
        ("StepInput.kv_slots",),
        rare=({"spare_blocks": 9000}, {"spare_blocks": 40_000, "block_size": 1}),
    ),
    Axis("rotary", (1.0, 0.5), ("Heads.rope", "Rope.cos", "Rope.sin")),
    Axis("interleaved", (False, True), ("Rope.interleaved",), needs="interleaved_rope"),
    Axis("turned", TURNED, ("StepInput.positions",)),
    Axis(
        "window",
        (None, 1, 7, 128, 1030),
        ("Heads.window",),
        rare=(
            {"window": 4097, "context": 8200, "chunk": 17, "kv_heads": 1},
            {"window": 8192, "context": 12_300, "chunk": 17, "kv_heads": 1, "chunked": True},
        ),
        needs="window",
    ),
    Axis("chunked", (False, True), ("Heads.chunked",), needs="chunks"),
    Axis("causal", (True, False), ("Heads.causal",), needs="encoders"),
    Axis("image_tokens", (0, 1, 5, 64, 257), ("StepInput.ends",), needs="encoders"),
    Axis("softcap", (None, 5.0, 50.0), ("Heads.softcap",), needs="softcap"),
    Axis("sinks", (False, True), ("Heads.sinks",), needs="sinks"),
    Axis("head_norms", (False, True), ("Heads.q_norm", "Heads.k_norm")),
    Axis("norms_rotated", (False, True), ("Heads.norms_rotated",)),
    Axis("query_rope", (False, True), ("Heads.query_rope",)),
    Axis("joint_norms", (False, True), ("Heads.joint_widths",), needs="joint_norms"),
    Axis("pre_norm", (True, False)),
    Axis("post_norm", (False, True)),
    Axis("biases", (False, True), needs="biases"),
    Axis("activation", ACTIVATIONS),
    Axis("ungated", (None, *get_args(PlainActivation)), needs="ungated"),
    Axis("experts", (0, 2, 5, 33, 128), ("Experts.router", "Experts.gate_up", "Experts.down"), needs="moe"),
    Axis("top_k", (2, 1, 4, 8, 16), ("Experts.top_k",), needs="moe"),
    Axis("normalize", (True, False), ("Experts.normalize",), needs="moe"),
    Axis("shared_expert", (False, True), ("Experts.shared_gate_up", "Experts.shared_down"), needs="moe"),
    Axis("shared_gate", (False, True), ("Experts.shared_gate",), needs="shared_gate"),
    Axis("correction_bias", (False, True), ("Experts.correction_bias",), needs="moe"),
    Axis("scoring", ("softmax", "sigmoid"), ("Experts.scoring",), needs="any_experts"),
    Axis("weighs_inputs", (False, True), ("Experts.weighs_inputs",), needs="any_experts"),
    Axis("expert_groups", (1, 2, 3, 8), ("Experts.groups", "Experts.top_groups"), needs="any_experts"),
    Axis("weight_scale", (1.0, 2.5), ("Experts.weight_scale",), needs="any_experts"),
    Axis("expert_biases", (False, True), ("Experts.router_bias",), needs="biased_experts"),
    Axis("ungated_experts", (None, "relu2", "gelu"), ("Experts.ungated",), needs="ungated_experts"),
    Axis("clamped", (False, True), needs="biased_experts"),
    Axis("packed", (None, *sorted(WEIGHT_FORMATS))),
    Axis("kv_dtype", ("auto", *KV_TYPES), ("KVShape.dtype",)),
    Axis("adapters", (0, 1, 2, 8), ("StepInput.lora_slots", "StepInput.lora_groups", "Lora.deltas", "Lora.step")),
    Axis("adapter_rank", (8, 1, 5, 16, 64), rare=({"adapters": 2, "adapter_rank": 512},)),
    Axis("composed", (False, True), needs="paged_kv"),
)
"""Axes of a layer and of the step over it; `composed` replaces the pack's fusions by their primitives."""
_GROUPED: Final = "a layer has the places of one group; engines of models with windows have several"
EXCUSED: Final[Mapping[str, str]] = {
    "StepInput.token_ids": "no layer reads them; models embed them",
    "StepInput.logits_rows": "the head of a model reads them; the part `embedded` varies them",
    "StepInput.states": "a model begins with them; the part `embedded` varies them",
    "StepInput.added": "models add them between layers; the part `embedded` varies them",
    "StepInput.kinds": "models divide tokens by them; `test_images_are_those_of_the_reference` varies them",
    "StepInput.grouped": _GROUPED,
    "StepInput.group": _GROUPED,
    "KVShape.groups": _GROUPED,
    "KVShape.first_kv_head": "ranks vary it; see `test_ranks`",
    "Experts.first": "ranks vary it; see `test_ranks`",
    "KVShape.first_layer": "stages vary it; see `test_ranks`",
}
"""Fields of the contract that no axis varies, with the reason."""

FUSIONS: Final = ("attention_inputs", "attention", "project_residual", "mlp_inputs or moe_residual", "project_residual")
"""Results of `LayerOn.run`."""
_MAX_PRODUCT: Final = 4e8
"""Multiplications of the products of a case."""
_MAX_SCORES: Final = 1e7
"""Scores of attention over all heads."""
_MAX_ELEMENTS: Final = 6e6
"""Elements of weights, and of the cache."""


def rows_of(case: Case) -> list[tuple[int, int]]:
    """Return (tokens, context) of each row: decodes of `context` tokens and of others, and chunks among them.

    The first chunk follows a context, the others are shorter and begin their prompts. Shared blocks come before
    all decodes. A case of images has a chunk of more tokens than one of them.
    """
    context, decodes, images = int_of(case, "context"), int_of(case, "decodes"), int_of(case, "image_tokens")
    chunk = int_of(case, "chunk") or (images and images + 3)
    tokens = 1 + int_of(case, "drafts")
    shared = min(int_of(case, "shared_blocks") * int_of(case, "block_size"), 300)
    most = 1 if context == 1 else min(max(context, 64), 300)
    contexts = [shared + (context if index == 0 else 1 + 37 * index % most) for index in range(decodes)]
    rows = [(tokens, max(tokens, context)) for context in contexts]
    for index in range(int_of(case, "chunks") if chunk else 0):
        count = max(1, chunk - index * (1 + chunk // 5))
        rows.insert((index + 1) * len(rows) // 2, (count, count if index else count + context - 1))
    return rows


def geometry_of(case: Case) -> Geometry:
    """Return the layer of a case."""
    heads, d, rank = (
        int_of(case, "kv_heads") * int_of(case, "group"),
        int_of(case, "head_dim"),
        int_of(case, "adapter_rank"),
    )
    return Geometry(
        heads=heads,
        kv_heads=int_of(case, "kv_heads"),
        d=d,
        rotary=None if case["rotary"] == 1.0 else d // 4 * 2,
        adapter_ranks=tuple(max(1, rank - index % 3) for index in range(int_of(case, "adapters"))),
        **{name: case[name] for name in _SAME},  # type: ignore[arg-type]
    )


_SAME: Final = {*Geometry.__dataclass_fields__} & {axis.name for axis in AXES} - {"kv_heads", "rotary"}


def allowed(case: Case) -> bool:
    """Return True if a layer can have the values of a case, and numpy computes it in about a second."""
    experts = int_of(case, "experts")
    if experts and (not has_groups(case) or case["adapters"]):
        return False
    if case["uniform"] and (case["chunk"] or case["image_tokens"]):
        return False
    if case["image_tokens"] and not case["causal"]:
        return False
    kv_heads, d, hidden, inner = (int_of(case, name) for name in ("kv_heads", "head_dim", "hidden", "inner"))
    heads, block_size = kv_heads * int_of(case, "group"), int_of(case, "block_size")
    if case["packed"] is not None and (hidden % 128 or inner % 128 or heads * d % 128):
        return False
    if not (rows := rows_of(case)):
        return False
    attention = hidden * d * 2 * (heads + kv_heads)
    active = attention + 3 * hidden * inner * (int_of(case, "top_k") if experts else 1)
    weights = attention + 3 * hidden * inner * max(1, experts)
    contexts = [context for _, context in rows]
    tokens, scores = sum(count for count, _ in rows), sum(count * context for count, context in rows) * heads
    blocks = sum([-(-context // block_size) for context in contexts]) + int_of(case, "spare_blocks")
    # A simple pack pads all rows to the longest context.
    padded = len(rows) * max(contexts)
    cache = blocks * block_size * kv_heads * d * 4
    return (
        tokens * active < _MAX_PRODUCT
        and max(scores, 32 * padded) < _MAX_SCORES
        and max(weights, cache) < _MAX_ELEMENTS
    )


def has_groups(case: Case) -> bool:
    """Return True if the groups of experts are equal, with two experts or more, and the best ones have enough."""
    experts, groups = int_of(case, "experts"), int_of(case, "expert_groups")
    equal = groups == 1 or (experts % groups == 0 and experts > groups)
    return equal and int_of(case, "top_k") <= experts // groups * half_of(groups)


def check_layer(ops: Ops, case: Case) -> None:
    """Compare what the pack computes in a case, and the cache after it, with numpy. Raises `AssertionError`."""
    geometry, rows = geometry_of(case), rows_of(case)
    ours, oracle = LayerOn(ops, geometry, rows), LayerOn(NumpyOps(), geometry, rows)
    before = ours.exported()
    tolerance = max(TOLERANCE[ops.dtype], 0.0 if geometry.packed is None else PACKED_TOLERANCE[geometry.packed])
    of_sums = max(TOLERANCE[ops.dtype], 1e-4)  # of tens of thousands of values in another order
    found = ours.run(Ops if case["composed"] else ops)
    expected = oracle.run(Ops, found, float32_of(ours.exported()) if geometry.kv_dtype == "auto" else ours.exported())
    if oracle.experts is not None:
        decided = oracle.decided(NumpyOps().rms_norm(found[2], oracle.norm), 1e-3 if tolerance < 1e-4 else 0.1)
        found[3], expected[3] = found[3][decided], expected[3][decided]
    for name, one, other in zip(FUSIONS, found, expected, strict=False):
        if other.size:
            with named(name):
                assert_near(ops, ops.from_host(one), other, of_sums if name == "attention" else tolerance)
    with named("cache"):
        assert oracle.written is not None
        check_cache(ops, ours, before, oracle.written, max(tolerance, KV_STEP[geometry.kv_dtype]))


def check_cache(
    ops: Ops, layer: LayerOn, before: npt.NDArray[Any], right: npt.NDArray[Any], tolerance: float | None = None
) -> None:
    """Compare the cache of a layer that ran with the oracle's; no other position differs from `before`.

    Raises `AssertionError`.
    """
    size, rows = layer.g.block_size, layer.rows
    written = np.zeros((layer.cache.num_blocks, size), np.bool_)
    written.reshape(-1)[step_input(rows, size, layer.blocks).kv_slots] = True
    free = written.copy()
    for (_, context), table in zip(rows, layer.blocks, strict=True):
        # What follows a context in its last block means nothing; a pack may clear it.
        free[table[(context - 1) // size], (context - 1) % size + 1 :] = True
    after, bits = layer.exported(), f"u{before.itemsize}"
    changed = after.view(bits) != before.view(bits)  # by bits, as what no token was written to is NaN
    others = np.flatnonzero(changed[:, 0].reshape(len(after), -1).any(axis=1)).tolist()
    assert not others, f"blocks {others[:9]} of another layer were written to"
    # Axes: block, position, key or value, head, element.
    after, changed, right = (each[:, 1].swapaxes(1, 2) for each in (after, changed, right))
    differ = changed.reshape(*written.shape, -1).any(axis=2) & ~free
    assert not differ.any(), f"(block, position) {np.argwhere(differ)[:5].tolist()} of other tokens were written to"
    if layer.cache.shape.quantized:
        steps = np.abs(after[written][..., :-SCALE_BYTES].astype(np.int16)).max(axis=-1)
        assert np.isin(steps, (0, 127)).all(), (
            "a key or value has not the scale of its own head: its largest is not 127"
        )
    found, expected = (float32_of(np.ascontiguousarray(each[written])) for each in (after, right))
    found = but_for_a_step(found, expected, layer.g.kv_dtype)
    assert_near(ops, ops.from_host(found.reshape(len(found), -1)), expected.reshape(len(found), -1), tolerance)


def sizes_of(case: Case) -> Mapping[str, int]:
    """Return the sizes of a case under the names of `OperatingEnvelope`."""
    return sizes_of_layer(geometry_of(case), rows_of(case))


EDGES: Final[Mapping[str, Edge]] = {
    "max_num_seqs": Edge("decodes"),
    "max_num_batched_tokens": Edge("chunk", {"decodes": 0}),
    "max_model_len": Edge("context"),
    "block_size": Edge("block_size"),
    "max_loras": Edge("adapters"),
    "max_lora_rank": Edge("adapter_rank", {"adapters": 1}),
    "hidden": Edge("hidden", step=2),
    "inner": Edge("inner", step=2),
    "head_dim": Edge("head_dim", step=2),
    "group": Edge("group"),
    "experts": Edge("experts"),
    "top_k": Edge("top_k", {"experts": 128}),
}
_MODEL_STEPS: Final[Sequence[Case]] = (
    {"decodes": 1, "context": 129},
    {"decodes": 33, "chunk": 17, "context": 257},
    {"decodes": 0, "chunk": 129, "context": 1025, "block_size": 32},
)
_MAX_MODEL_ELEMENTS: Final = 2e8
"""Elements of the weights of a model's layer; inner width or experts are halved above it."""


def cases_of_model(model: DecoderSpec) -> list[Case]:
    """Return some steps over each kind of layer of a model."""
    kinds = dict.fromkeys(
        tuple(_layer_case(model, layer.attention, layer.feed_forward).items())
        for layer in model.layers
        if isinstance(layer.attention, AttentionSpec)
        and layer.attention.latent is None
        and layer.feed_forward is not None
    )
    return [{**dict(kind), **step} for kind in kinds for step in _MODEL_STEPS]


def _layer_case(model: DecoderSpec, attention: AttentionSpec, block: MlpSpec | MoeSpec) -> Case:
    rotary = 2 * len(attention.rope.inverse_frequencies)
    case: dict[str, Value] = {
        "kv_heads": attention.num_kv_heads,
        "group": attention.num_heads // attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden": model.embedding.shape[1],
        "inner": block.downs[0].ins,
        "rotary": 1.0 if rotary == attention.head_dim else 0.5,
        "interleaved": attention.rope.interleaved,
        "window": attention.window,
        "chunked": attention.chunked,
        "causal": attention.causal,
        "softcap": attention.softcap,
        "sinks": attention.sinks is not None,
        "head_norms": attention.q_norm is not None,
        "norms_rotated": attention.norms_rotated,
        "query_rope": attention.rope.growth is not None,
        "joint_norms": attention.joint_norms,
        "pre_norm": attention.norm is not None,
        "post_norm": attention.post_norm is not None,
        "biases": attention.qkv.bias,
    }
    if block.gated and model.activation != "clamped_swiglu":
        case["activation"] = model.activation
    elif not block.gated:
        case["ungated_experts" if isinstance(block, MoeSpec) else "ungated"] = model.activation
    halved, smallest = "inner", 128
    if isinstance(block, MoeSpec):
        halved, smallest = "experts", 2 * block.top_k * block.groups
        case |= {
            "experts": len(block.experts),
            "top_k": block.top_k,
            "normalize": block.normalize,
            "shared_expert": block.shared is not None,
            "shared_gate": block.shared_gate is not None,
            "correction_bias": block.correction_bias is not None,
            "scoring": block.scoring,
            "weighs_inputs": block.weighs_inputs,
            "expert_groups": block.groups,
            "weight_scale": block.weight_scale,
            "expert_biases": block.router_bias is not None,
            "clamped": model.activation == "clamped_swiglu",
        }
    while (size := int_of(case, halved)) >= 2 * smallest and _elements(case) > _MAX_MODEL_ELEMENTS:
        case[halved] = size // 2
    return case


def _elements(case: Case) -> int:
    return 3 * int_of(case, "hidden") * int_of(case, "inner") * max(1, int_of({"experts": 0, **case}, "experts"))


NEEDS: Final = ("primitives", "kv_transfer")
LAYERS: Final[Part[Ops]] = operation_part(
    "layer", AXES, check_layer, allowed, EDGES, needs=NEEDS, sizes=sizes_of, of_model=cases_of_model
)
