"""Providers that fail, or compute other values, are replaced by the next one; the start continues."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.config import EngineConfig  # noqa: E402 - only where torch is installed
from fd_core.errors import PluginError  # noqa: E402
from fd_core.models.decoder import DecoderModel  # noqa: E402
from fd_core.models.families.latent.deepseek import DeepSeekV2  # noqa: E402
from fd_core.models.families.recurrent.lfm import Lfm2  # noqa: E402
from fd_core.ops.contract import Heads, KVShape, Rope  # noqa: E402
from fd_core.ops.parallel import Parallel  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess  # noqa: E402
from fd_core.runner.runner import Runner  # noqa: E402
from fd_core.testing.models.arrays import Values, on_device, step_input  # noqa: E402
from fd_core.testing.models.checkpoints import SIZES, write_checkpoint, write_config  # noqa: E402
from processor import PLAIN, OnProcessor, Processor, make_ops, plain_attention  # noqa: E402
from test_steps import LIMITS, MIXED, conversation  # noqa: E402

from fd_gpu_cuda.backend import CudaBackend  # noqa: E402
from fd_gpu_cuda.kernel_table import Kernels, SamplingKernels  # noqa: E402
from fd_gpu_cuda.kernels.recurrent import recur  # noqa: E402
from fd_gpu_cuda.providers import (  # noqa: E402
    ModelTrial,
    Operation,
    Provider,
    Providers,
    TrialSkipped,
    operations_on,
    wanted_providers,
)

Models = Callable[[str], DecoderModel]
FAMILIES = {"latent": (DeepSeekV2, "yarn"), "recurrent": (Lfm2, next(iter(Lfm2.cases)))}


class Device(Processor):
    multiprocessors = 132  # type: ignore[assignment]  # a property of `Cuda`
    shared_memory_per_block = 232448  # type: ignore[assignment]  # as above


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, DecoderModel] = {}

    def of(case: str) -> DecoderModel:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            if case in FAMILIES:
                family, name = FAMILIES[case]
                named = {"architectures": [*family.architectures], "vocab_size": 97}
                write_config({**SIZES, **family.defaults, **SIZES, **family.cases[name], **named}, folder, seed=3)
            else:
                write_checkpoint(case, folder)
            backend = OnProcessor(EngineConfig(model=str(folder)))
            made[case] = backend.load_model(folder, make_ops(), lambda done, total: None)
        return made[case]

    return of


def settled(model: DecoderModel, providers: Providers) -> Kernels:
    return providers.settle(ModelTrial(model, make_ops(), providers.composed, 4, "auto"))


def table_with(field: str, make: Callable[[], Any]) -> Providers:
    """Operations of plain torch, but for one that has another provider before it."""
    operations = [
        Operation(
            each.name,
            "what is tried" if each.name == field else each.name,
            (
                *((Provider("double", make),) if each.name == field else ()),
                *((Provider("plain", lambda name=each.name: getattr(PLAIN, name)),) if each.name != "recur" else ()),
            ),
            composition=None if each.name == "attention" else getattr(PLAIN, each.name),
            of_logits=each.name == "sampling",
        )
        for each in fields(Kernels)
        if each.name == field or getattr(PLAIN, each.name) is not None
    ]
    return Providers(operations)


def raising(*_: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def decodes_only(q: Any, layer: Any, heads: Heads, step: Any) -> Any:
    return plain_attention(q, layer, heads, step) * (1.0 if step.max_query == 1 else 1.01)


def without_window(q: Any, layer: Any, heads: Heads, step: Any) -> Any:
    return plain_attention(q, layer, replace(heads, window=None), step)


def without_softcap(q: Any, layer: Any, heads: Heads, step: Any) -> Any:
    return plain_attention(q, layer, replace(heads, softcap=None), step)


def without_rotation(q: Any, layer: Any, heads: Heads, step: Any) -> Any:
    return plain_attention(q, layer._replace(keys=layer.keys * 0), heads, step)


def one_row_wrong(q: Any, layer: Any, heads: Heads, step: Any) -> Any:
    output = plain_attention(q, layer, heads, step)
    output[-1] *= 1.01
    return output


ATTENTION: list[tuple[str, Callable[..., Any], str]] = [
    ("llama", raising, "it fails: RuntimeError: no kernel image is available for execution on the device"),
    ("llama", lambda *step: plain_attention(*step) * torch.nan, "attention of a decode: not finite"),
    ("llama", lambda *step: plain_attention(*step) * 1.002, "attention of a decode: maximum error "),
    ("llama", lambda *step: plain_attention(*step).half(), "expected torch.float32[3, 64], got torch.float16[3, 64]"),
    ("llama", decodes_only, "attention of chunks of prompts: maximum error "),
    ("llama", one_row_wrong, "attention of a decode: maximum error "),
    ("gemma3", without_window, "attention of a decode, window "),
    ("llama, softcap", without_softcap, "attention of a decode: maximum error "),
    ("latent", without_rotation, "attention of a decode: maximum error "),
]


@pytest.mark.parametrize(("case", "double", "why"), ATTENTION, ids=range(len(ATTENTION)))
def test_wrong_attention_is_replaced(
    case: str, double: Any, why: str, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    model = models(case.partition(",")[0])
    if case == "llama, softcap":
        model = with_softcap(model)
    providers = table_with("attention", lambda: double)
    with caplog.at_level(logging.WARNING):
        assert settled(model, providers) == PLAIN
    (line,) = caplog.messages
    assert line.startswith("what is tried is not computed by double but by plain: ")
    assert why in line
    assert "\n" not in line
    assert providers.name("attention") == "plain"


def with_softcap(model: DecoderModel) -> DecoderModel:
    layers = tuple(
        replace(each, attention=replace(each.attention, heads=replace(each.attention.heads, softcap=0.5)))
        for each in model.decoder.layers
    )
    return replace(model, decoder=replace(model.decoder, layers=layers))


def without_norms(model: DecoderModel) -> DecoderModel:
    layers = (
        replace(each, attention=replace(each.attention, norm=None), feed_forward=replace(each.feed_forward, norm=None))
        for each in model.decoder.layers
    )
    return replace(model, decoder=replace(model.decoder, layers=tuple(layers)))


@pytest.mark.parametrize("field", ["attention", "rotate_and_store", "gate"])
def test_kernels_are_tried_on_layers_without_norms_before_blocks(models: Models, field: str) -> None:
    for kernel, kept in ((getattr(PLAIN, field), "double"), (raising, "plain")):
        providers = table_with(field, lambda kernel=kernel: kernel)
        settled(without_norms(models("llama")), providers)
        assert providers.name(field) == kept


def test_ignored_window_is_accepted_only_without_window_layers(models: Models) -> None:
    assert settled(models("llama"), table_with("attention", lambda: without_window)).attention is without_window


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ImportError("libcudart.so.12: cannot open"), "it cannot be made: ImportError: libcudart.so.12: cannot open"),
        (KeyError(), "it cannot be made: KeyError"),
        (OSError("x" * 5000), "it cannot be made: OSError: xxx"),
    ],
)
def test_failing_provider_is_replaced_before_the_model_is_loaded(
    error: Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        raise error

    with caplog.at_level(logging.WARNING):
        providers = table_with("sampling", make)
    (line,) = caplog.messages
    assert message in line
    assert len(line) < 500
    assert providers.kernels == PLAIN


def keeping_no_states(x: Any, recurrent: Any, layer: Any, step: Any) -> Any:
    return recur(x, recurrent, layer._replace(keys=layer.keys.clone()), step)


@pytest.mark.parametrize(
    ("double", "why"),
    [
        (recur, ""),
        (lambda x, *step: recur(x * 1.01, *step), "a recurrence over prompts: maximum error "),
        (keeping_no_states, "the states of prompts: "),
    ],
)
def test_wrong_recurrence_is_replaced(double: Any, why: str, models: Models, caplog: pytest.LogCaptureFixture) -> None:
    providers = table_with("recur", lambda: double)
    with caplog.at_level(logging.WARNING):
        assert settled(models("recurrent"), providers).recur is (None if why else recur)
    assert why in "".join(caplog.messages)


def spilling_write(k: Any, v: Any, layer: Any, kv_slots: Any) -> None:
    layer.keys.index_copy_(0, kv_slots.long(), k)
    layer.values.index_copy_(0, kv_slots.long(), v)
    layer.values[2] = 0.0


@pytest.mark.parametrize(
    ("method", "double", "why"),
    [
        ("sample", lambda logits, rows: (logits.argmax(1).int(), logits.amax(1)), "random tokens: "),
        ("sample", lambda logits, rows: TorchOps().sample(logits, replace(rows, any_filter=False)), "filtered tokens"),
        ("mask_logits", lambda logits, rows, bits: logits, "masked logits: "),
        ("penalize", lambda logits, rows: logits, "penalties: "),
        ("ranks", raising, "it fails: RuntimeError"),
    ],
)
def test_wrong_sampler_is_replaced(
    method: str, double: Any, why: str, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = SamplingKernels()
    setattr(wrong, method, double)
    with caplog.at_level(logging.WARNING):
        assert settled(models("llama"), table_with("sampling", lambda: wrong)) == PLAIN
    assert why in caplog.text


def test_write_outside_the_slots_of_the_step_is_detected(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    plain = replace(PLAIN, rotate_and_store=None)  # which writes itself
    operations = [
        Operation(each.name, each.name, (), composition=getattr(plain, each.name)) for each in fields(Kernels)
    ]
    spilling = (Provider("double", lambda: spilling_write),)
    operations = [replace(each, providers=spilling) if each.field == "write_kv" else each for each in operations]
    with caplog.at_level(logging.WARNING):
        assert settled(models("llama"), Providers(operations)) == plain
    assert "write_kv is not computed by double but by torch: written values of a decode" in caplog.text


def test_failing_composition_is_not_attributed_to_a_provider(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    providers = table_with("attention", lambda: plain_attention)

    def trial(operation: Operation, table: Kernels) -> str:
        raise TrialSkipped("out of memory")

    with caplog.at_level(logging.WARNING):
        providers.settle(trial)
    assert providers.name("attention") == "double"
    assert "what is tried is used without a trial, which is not possible: TrialSkipped: out of memory" in caplog.text


def test_failure_of_an_explicit_provider_ends_the_start(models: Models) -> None:
    operation = Operation("attention", "attention", (Provider("triton", lambda: raising),), "--attention-backend")
    others = [Operation(each, each, (), composition=getattr(PLAIN, each)) for each in ("sampling", "packed_product")]
    providers = Providers([operation, *others], {"attention": "triton"})
    with pytest.raises(PluginError, match="attention cannot be computed by triton: it fails: RuntimeError") as refused:
        settled(models("llama"), providers)
    assert (refused.value.exit_code, refused.value.field) == (4, "--attention-backend")
    assert refused.value.hint is not None


def test_explicit_flashinfer_without_support_ends_the_start() -> None:
    for kv_dtype in ("auto", "int8"):
        with pytest.raises(PluginError, match=r"cannot be computed by flashinfer: (flashinfer is not|it needs KV)"):
            Providers(operations_on(Device(), "float32", kv_dtype), wanted_providers("flashinfer"))


def test_flashinfer_is_used_only_if_it_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_gpu_cuda.providers.missing", lambda *_: [])
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    operations = operations_on(Device(), "bfloat16", "auto")
    for wanted, used in (("auto", "triton"), ("flashinfer", "flashinfer")):
        assert Providers(operations, wanted_providers(wanted)).name("planned_attention") == used


@pytest.mark.parametrize("case", ["gemma3", "latent"])
def test_every_field_has_an_operation_and_every_kernel_is_correct(case: str, models: Models) -> None:
    """Triton's own kernels, in the interpreter."""
    operations = operations_on(Device(), "float32", "auto", ranks=2)
    assert {each.field for each in operations} == {each.name for each in fields(Kernels)}
    providers = Providers(operations)
    settled(models(case), providers)
    assert providers.describe() == "computed by triton"


def test_sums_of_ranks_are_tried_where_there_are_ranks(models: Models) -> None:
    providers = table_with("add_ranks", lambda: lambda parts: parts[0])
    ops = make_ops()
    ops.parallel = Parallel(1, 2)
    providers.settle(ModelTrial(models("llama"), ops, providers.composed, 4, "auto"))
    assert providers.name("add_ranks") == "plain"


def test_a_layer_without_a_feed_forward_block_is_tried(models: Models) -> None:
    model = models("llama")
    bare = tuple(replace(layer, feed_forward=None) for layer in model.decoder.layers)
    alone = replace(model, decoder=replace(model.decoder, layers=bare))
    assert settled(alone, table_with("attention", lambda: plain_attention)).attention is plain_attention
    assert settled(alone, table_with("attention", lambda: one_row_wrong)).attention is not one_row_wrong


def test_backend_reports_its_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_gpu_cuda.device.Cuda", Device)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("fd_gpu_cuda.kernels.attention.PagedAttention", lambda *_: raising)
    monkeypatch.setattr("fd_gpu_cuda.backend.compiler_problem", lambda: "")
    folder = write_checkpoint("llama", tmp_path / "model")
    backend = CudaBackend(EngineConfig(model=str(folder)))
    ops = backend.make_ops()
    assert backend.describe() == "processor, computed by triton"
    backend.load_model(folder, ops, lambda done, total: None)
    assert backend.describe() == "processor, computed by triton, attention by torch"
    assert backend.warnings == ()
    named = CudaBackend(EngineConfig(model=str(folder), attention_backend="triton"))
    with pytest.raises(PluginError, match="attention cannot be computed by triton"):
        named.load_model(folder, named.make_ops(), lambda done, total: None)


def test_missing_compiler_is_reported_if_a_kernel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_gpu_cuda.device.Cuda", Device)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("fd_gpu_cuda.kernels.attention.PagedAttention", lambda *_: raising)
    monkeypatch.setattr("fd_gpu_cuda.backend.compiler_problem", lambda: "no C compiler")
    folder = write_checkpoint("llama", tmp_path / "model")
    backend = CudaBackend(EngineConfig(model=str(folder)))
    backend.load_model(folder, backend.make_ops(), lambda done, total: None)
    assert backend.warnings == ("no C compiler",)


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3-moe"])
def test_composed_torch_steps_are_correct_and_not_captured(case: str, tmp_path: Path) -> None:
    folder = write_checkpoint(case, tmp_path / case)
    processor, outputs = Processor(), []
    composed = Providers(operations_on(Device(), "float32", "auto")).composed
    packs = TorchOps(), make_ops(processor).alone(composed)
    for ops in packs:
        model = OnProcessor(EngineConfig(model=str(folder))).load_model(folder, ops, lambda done, total: None)
        runner = Runner(ops, model, LIMITS, TorchPostprocess)
        outputs.append([runner.execute(each).tokens for each in conversation(MIXED)])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert (processor.captured, processor.replays) == (0, 0)


def test_attention_without_a_kernel_reads_8_bits() -> None:
    heads = Heads(4, 2, 16, 0.25, Rope(None, None))
    tables = np.array([[3, 9, 1, 0], [2, 5, 77, -3]], np.int32)  # entries beyond a context are undefined
    values, outputs = Values(4), []
    k, v, q = values(40, 2, 16), values(40, 2, 16), values(6, 4, 16)
    for ops in (TorchOps(), make_ops(Device()).alone(replace(PLAIN, attention=None))):
        layer = ops.allocate_kv(KVShape(1, 2, 16, 4, "int8"), 10).layer(0)
        ops.write_kv(layer, *map(ops.from_host, (k, v)), ops.from_host(np.arange(40, dtype=np.int32)))
        step = on_device(ops, step_input([(2, 11), (4, 7)], 4, np.where(tables < 10, tables, 0).clip(0)))
        if layer.keys.shape[-1] == 16:
            step = replace(step, block_tables=ops.from_host(tables))
        outputs.append(ops.to_host(ops.paged_attention(ops.from_host(q), layer, heads, step)))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)


def test_kernel_that_breaks_the_device_ends_the_start_with_its_name(models: Models) -> None:
    """After an illegal access every call fails, those of torch's own operations too."""

    class Broken(Processor):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    providers = table_with("gate", lambda: raising)
    trial = ModelTrial(models("llama"), make_ops(Broken()), providers.composed, 4, "auto")
    with pytest.raises(PluginError, match="what is tried: a kernel broke the device") as caught:
        providers.settle(trial)
    assert "CUDA_LAUNCH_BLOCKING=1" in caught.value.hint


def test_state_kept_from_a_kernel_trial_is_writable_while_serving(models: Models) -> None:
    """Such as the workspace of a library, made at its first call."""
    kept: list[Any] = []

    def gate(gate_up: Any, activation: Any) -> Any:
        kept.append(torch.zeros(1))
        return PLAIN.gate(gate_up, activation)  # type: ignore[misc]  # it has one

    settled(models("llama"), table_with("gate", lambda: gate))
    assert kept[0].add_(1) == 1
