"""Products with packed weights: the kernels in Triton's interpreter and the layout they read, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH  # noqa: E402
from fd_core.ops.weights import FP8, WEIGHT_FORMATS, PackedTensor, RawTensor  # noqa: E402
from fd_core.testing.models.arrays import packed_weight  # noqa: E402 - only where both are installed
from interpreting import dots_in_order  # noqa: E402, F401 - a fixture
from processor import plain_product  # noqa: E402

from fd_gpu_cuda.kernels.products import ProductDevice, operands, quantize_rows, tile_of, weight_product  # noqa: E402
from fd_gpu_cuda.packed import PackedLinear, pack_linear  # noqa: E402

SMALL, H100 = ProductDevice(2, 99 * 1024), ProductDevice(132, 227 * 1024)
IN_THE_INTERPRETER, CUT = weight_product(SMALL), weight_product(H100)


def linear(
    parts: list[PackedTensor], biases: list[RawTensor] | None = None, *, eight: bool = False
) -> PackedLinear | None:
    return pack_linear(parts, biases, "cpu", lambda fp8: eight)


def multiply(x: Any, weight: PackedLinear | None, product: Any = IN_THE_INTERPRETER) -> Any:
    assert weight is not None
    return weight(x, product)


def rows_of(count: int, inputs: int, dtype: Any = torch.float32) -> Any:
    x = np.random.default_rng(4).standard_normal((count, inputs)).astype(np.float32)
    x[:, ::37] *= 9  # outliers
    return torch.from_numpy(x).to(dtype)


def expected(x: Any, weight: PackedTensor, dtype: Any = torch.float32) -> Any:
    return x.double() @ torch.from_numpy(weight.to_float32()).to(dtype).double().T


@pytest.mark.parametrize("product", [IN_THE_INTERPRETER, plain_product], ids=["kernel", "plain"])
@pytest.mark.parametrize("kind", sorted(WEIGHT_FORMATS))
def test_every_format_decodes_to_its_values(kind: str, product: Any) -> None:
    weight, x = packed_weight(kind, 70, 512), rows_of(9, 512)
    right = expected(x, weight)
    assert torch.allclose(multiply(x, linear([weight]), product).double(), right, rtol=0, atol=1e-5 * right.abs().max())


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "int8", FP8])
def test_weights_are_rounded_like_dequantized_ones(kind: str) -> None:
    """float16, because the interpreter cannot multiply matrices of bfloat16."""
    weight, x = packed_weight(kind, 70, 768), rows_of(17, 768, torch.float16)
    right, found = expected(x, weight, torch.float16), multiply(x, linear([weight]))
    assert found.dtype == torch.float16
    assert torch.allclose(found.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        # The sample takes the types in turn.
        pytest.param(kind, dtype, marks=() if place == number % 2 else AT_LENGTH)
        for number, kind in enumerate(sorted(WEIGHT_FORMATS))
        for place, dtype in enumerate((torch.float16, torch.float32))
    ],
)
def test_widened_weights_have_the_bits_of_dequantized_ones(kind: str, dtype: Any) -> None:
    """Tokens of one input each return the weights themselves."""
    weight = packed_weight(kind, 40, 256)
    found = multiply(torch.eye(256, dtype=dtype), linear([weight]))
    assert torch.equal(found.T, torch.from_numpy(weight.to_float32()).to(dtype))


@pytest.mark.parametrize(("out", "inputs"), [(1, 16), (65, 48), (3, 1040), (70, 2048)])
@pytest.mark.parametrize("kind", ["int4", "int8", FP8])
def test_rows_of_one_scale_have_any_length(kind: str, out: int, inputs: int) -> None:
    weight, x = packed_weight(kind, out, inputs, group=inputs), rows_of(5, inputs)
    right = expected(x, weight)
    assert torch.allclose(multiply(x, linear([weight])).double(), right, rtol=0, atol=2e-5 * right.abs().max())


def test_parts_keep_order_format_and_bias() -> None:
    kinds, outs = ("Q4_K", "Q4_K", "Q6_K", "int8"), (33, 7, 40, 5)
    parts = [packed_weight(kind, out, 256) for kind, out in zip(kinds, outs, strict=True)]
    biases = [RawTensor("F32", np.arange(out, dtype=np.float32) * 10) for out in outs]
    weight, x = linear(parts, biases), rows_of(3, 256)
    assert weight is not None and [part.out for part in weight.parts] == [40, 40, 5]
    right = torch.cat(
        [expected(x, part) + torch.from_numpy(bias.data) for part, bias in zip(parts, biases, strict=True)], 1
    )
    assert torch.allclose(multiply(x, weight).double(), right, rtol=0, atol=1e-5 * right.abs().max())


def test_unsupported_formats_are_dequantized() -> None:
    assert linear([packed_weight("int4", 8, 96, group=24)]) is None
    assert linear([packed_weight("int4", 8, 96, group=48)]) is None
    assert (
        pack_linear([packed_weight("int4", 8, 64), RawTensor("F32", np.ones((8, 64), "f4"))], None, "cpu", bool) is None
    )


@pytest.mark.parametrize(("kind", "group"), [("int4", 96), ("int4", 64), ("int4", 1024), ("int8", 48), ("int8", 16)])
def test_groups_of_any_multiple_of_four_words(kind: str, group: int) -> None:
    weight, x = packed_weight(kind, 40, 48 * 64, group), rows_of(3, 48 * 64, torch.float16)
    right = expected(x, weight, torch.float16)
    assert torch.allclose(multiply(x, linear([weight])).double(), right, rtol=1e-3, atol=1e-3 * right.abs().max())


def test_bytes_on_the_device_match_the_format() -> None:
    weight = linear([packed_weight("Q4_0", 64, 512)])
    assert weight is not None
    (part,) = weight.parts
    assert part.values.nbytes == 64 * 256 and part.scales.dtype == torch.float16


# Products of 8 bits -------------------------------------------------------------------------------------------

EIGHT = [("int8", None, 768), ("Q8_0", 128, 768), (FP8, None, 768), (FP8, 128, 1024), ("int8", None, 200)]


def rounded(x: Any, fp8: bool) -> tuple[Any, Any]:
    """Return rows rounded like the kernel, in torch's own operations."""
    limit = 448 if fp8 else 127
    largest = x.float().abs().amax(1, keepdim=True)
    scaled = x.float() * (limit / largest)
    return (scaled.to(torch.float8_e4m3fn) if fp8 else scaled.round().to(torch.int8)), largest / limit


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_are_rounded_to_8_bits(fp8: bool, dtype: Any) -> None:
    x = rows_of(7, 1500, dtype)
    values, scales = quantize_rows(x, torch.float8_e4m3fn if fp8 else torch.int8)
    right, sizes = rounded(x, fp8)
    assert torch.equal(values.float(), right.float())
    assert torch.allclose(scales[:, None], sizes, rtol=1e-6)


@pytest.mark.parametrize(("kind", "group", "inputs"), EIGHT)
def test_products_of_8_bits_equal_the_same_arithmetic(kind: str, group: int | None, inputs: int) -> None:
    weight, x = packed_weight(kind, 150, inputs, group), rows_of(9, inputs, torch.float16)
    packed = linear([weight], eight=True)
    assert packed is not None and packed.parts[0].eight
    values, scales = rounded(x, kind == FP8)
    right = expected(values, weight) * scales
    assert torch.allclose(multiply(x, packed).double(), right, rtol=1e-3, atol=1e-3 * right.abs().max())


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.015), (FP8, 0.04)])
def test_rounding_to_8_bits_costs_little(kind: str, worst: float) -> None:
    weight, x = packed_weight(kind, 60, 512), torch.from_numpy(np.random.default_rng(0).standard_normal((9, 512), "f4"))
    right = expected(x, weight)
    error = multiply(x, linear([weight], eight=True)).double() - right
    assert error.square().mean().sqrt() < worst * right.std()


@pytest.mark.parametrize(("kind", "group"), [("Q8_0", 32), ("Q4_1", 128), ("int4", 32), ("int8", 64)])
def test_short_groups_and_minima_are_widened(kind: str, group: int) -> None:
    packed = linear([packed_weight(kind, 8, 256, group)], eight=True)
    assert packed is not None and not packed.parts[0].eight


def test_more_tiles_of_tokens_than_run_together() -> None:
    weight, x = packed_weight("int8", 70, 32, 32), rows_of(64 * 17 + 3, 32)
    right = expected(x, weight)
    assert torch.allclose(multiply(x, linear([weight])).double(), right, rtol=0, atol=1e-5 * right.abs().max())


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize(
    ("inputs", "kind", "eight"),
    [
        (256, "Q4_1", False),
        (256, "int8", True),
        (256, FP8, False),
        (256, FP8, True),
        (2048, "Q4_1", False),
        pytest.param(2048, "int8", True, marks=AT_LENGTH),
        pytest.param(2048, FP8, False, marks=AT_LENGTH),
        (2048, FP8, True),
    ],
)
def test_row_has_the_same_bits_alone_and_in_every_batch(inputs: int, kind: str, eight: bool) -> None:
    """The longer rows are cut: some programs share the cuts of few tokens, one has all of many."""
    weight, x = linear([packed_weight(kind, 70, inputs)], eight=eight), rows_of(130, inputs, torch.float16)
    together = multiply(x, weight, CUT)
    for rows in (slice(0, 1), slice(3, 20), slice(40, 80), slice(129, 130)):
        assert torch.equal(multiply(x[rows], weight, CUT), together[rows])


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("kind", ["int8", FP8])
def test_nan_and_inf_stay_in_their_own_row(kind: str, eight: bool) -> None:
    weight, x = linear([packed_weight(kind, 40, 256)], eight=eight), rows_of(4, 256)
    right = multiply(x, weight)
    x[1, 70], x[3, 5] = np.nan, np.inf
    found = multiply(x, weight)
    assert not torch.isfinite(found[[1, 3]]).any()
    assert torch.equal(found[[0, 2]], right[[0, 2]])


def test_rows_of_zeros_stay_zeros() -> None:
    x = torch.zeros(2, 256)
    x[1] = 1e-38
    for kind in ("int8", FP8):
        assert not multiply(x, linear([packed_weight(kind, 40, 256)], eight=True)).any()


# Tiles --------------------------------------------------------------------------------------------------------


def tiles(kind: str | None, out: int, inputs: int, device: ProductDevice = H100, **more: Any) -> list[Any]:
    x = torch.empty(1, inputs, dtype=more.pop("dtype", torch.bfloat16))
    packed = None if kind is None else linear([packed_weight(kind, out, inputs)], **more)
    weight = x.new_empty(out, inputs) if packed is None else packed.parts[0]
    return [tile_of(tokens, out, operands(x, weight), device) for tokens in (1, 17, 128, 5000)]


@pytest.mark.parametrize("kind", ["int4", "Q4_1", FP8, None])
def test_instructions_and_sums_do_not_depend_on_the_number_of_rows(kind: str | None) -> None:
    found = tiles(kind, 600, 2048)
    assert {tile.outputs % 64 for tile in found} == {0} and {tile.cut for tile in found} == {512}
    assert [tile.tokens for tile in found] == [16, 32, 128, 128]
    assert [tile.splits for tile in found] == [4, 4, 1, 1]


def test_few_rows_of_a_narrow_product_are_shared_by_enough_programs() -> None:
    (few, *_), (wide, *_) = tiles("int4", 1024, 4096), tiles("int4", 28672, 256)
    assert 128 <= 1024 // few.outputs * few.splits <= 264
    assert wide.splits == 1


@pytest.mark.parametrize("device", [SMALL, H100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stages_fit_into_the_shared_memory_of_a_block(dtype: Any, device: ProductDevice) -> None:
    for kind in ("int4", FP8, None):
        for tile in tiles(kind, 600, 2048, device, dtype=dtype):
            item = 4 if dtype == torch.float32 else 2
            weights = tile.outputs * (item if kind is None else 1)
            assert 64 * 1 <= tile.num_stages * 32 * (weights + tile.tokens * item) <= device.shared_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("out", "inputs"), [(48, 640), (70, 1100), (3, 40)])
def test_unpacked_weights_are_multiplied_unchanged(out: int, inputs: int, dtype: Any) -> None:
    x, weight = rows_of(7, inputs, dtype), rows_of(out, inputs, dtype)
    for product in (IN_THE_INTERPRETER, CUT):
        y = torch.full((7, out), torch.nan, dtype=dtype)
        product(x, weight, y)
        right = x.double() @ weight.double().T
        assert torch.allclose(
            y.double(), right, rtol=0, atol=(2e-5 if dtype == torch.float32 else 1e-3) * right.abs().max()
        )


def test_counters_are_zero_again_after_each_product() -> None:
    """Else the sums of a later product would be read before they are complete."""
    weight, x = linear([packed_weight("int4", 70, 2048)]), rows_of(3, 2048)
    first = multiply(x, weight, CUT)
    assert torch.equal(multiply(x, weight, CUT), first)
