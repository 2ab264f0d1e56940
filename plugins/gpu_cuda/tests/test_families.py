"""Every family of the registry, with the CPU in the device's place and plain kernels, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.backends.contract import Availability
from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.errors import ConfigError
from fd_core.models.families.contract import Family
from fd_core.models.families.installed import installed_families
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.contract import Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.arrays import Values
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.paged import PagedDriver
from fd_core.testing.models.texts import run
from fd_core.types import Image, RequestSpec, SamplingParams
from processor import PLAIN, OnProcessor, Processor, make_ops, nothing_waits
from safetensors.numpy import load_file, save_file

from fd_gpu_cuda.backend import CudaBackend
from fd_gpu_cuda.kernels import recurrent as kernels
from fd_gpu_cuda.ops import CudaOps

FAMILIES = {type(family).__name__: family for family in installed_families().architectures.values()}
REFUSED: Mapping[str, str] = {"ErnieVl": "experts for images"}
"""Families of which the plugin computes texts alone, and the text of the refusal."""
OWN_SIZES = {"DistilBert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}}
SEVERAL = ("Llama4", "GraniteHybrid", "NemotronH", "Qwen3Next", "Lfm2")
"""Families of which each case is computed."""


def config_of(name: str, case: str | None = None, **changes: Any) -> dict[str, Any]:
    family: Family = FAMILIES[name]
    fields = family.cases[case or next(iter(family.cases))]
    named = {"architectures": list(family.architectures[:1])}
    return {**SIZES, **family.defaults, **SIZES, **OWN_SIZES.get(name, {}), **fields, **named, **changes}


def logits(folder: Path, ops: Ops, *, with_image: bool = False, texts_only: bool = False) -> np.ndarray:
    with open_checkpoint(folder) as checkpoint:
        model: Any = load_model(checkpoint, ops, 64, texts_only=texts_only)
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 100, length).tolist() for length in (37 if with_image else 23, 2, 9)]
    images: list[tuple[Image, ...]] = []
    if with_image:
        spec = model.images.spec
        count = spec.side if spec.positions is not None or spec.whole else 2 * spec.merge
        count, side = count // spec.merge, count * spec.patch_size
        pixels = random.integers(0, 256, (side, side, 3), np.uint8).tobytes()
        images = [(Image(2, count**2, bytes(16), (side, side), pixels, (count, count)),), (), ()]
    driver = PagedDriver(model, ops, prompts, longest=64, images=images)
    driver.generate(3, None if with_image else 7)
    return np.concatenate([row.logits for row in driver.rows])


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_computed_as_by_numpy(tmp_path: Path, name: str) -> None:
    for case in FAMILIES[name].cases if name in SEVERAL else [None]:
        folder = tmp_path / str(case)
        write_config(config_of(name, case), folder, seed=1)
        if name in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                logits(folder, make_ops())
        found, expected = (logits(folder, ops, texts_only=name in REFUSED) for ops in (make_ops(), NumpyOps()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


IMAGES = ("Gemma3WithImages", "Qwen25Vl", "Idefics3")


@pytest.mark.hardware
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_computed_on_the_device_as_by_numpy(tmp_path: Path, name: str) -> None:
    """Every kernel is used without a trial; the first case of each family, and an image where it takes some."""
    write_config(config_of(name), tmp_path, seed=1)
    ops = CudaBackend(EngineConfig(model=str(tmp_path), dtype="float32")).make_ops()
    for with_image in (False, True)[: 1 + (name in IMAGES)]:
        settings = {"with_image": with_image, "texts_only": name in REFUSED}
        found, expected = (logits(tmp_path, each, **settings) for each in (ops, NumpyOps()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_encoded_as_by_numpy(tmp_path: Path, name: str) -> None:
    write_config(config_of(name), tmp_path, seed=1)
    expected = logits(tmp_path, NumpyOps(), with_image=True)
    np.testing.assert_allclose(logits(tmp_path, make_ops(), with_image=True), expected, rtol=0, atol=2e-4)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Processor]:
    """The backend `gpu_cuda` on processors, and those of the engines that were made."""
    made: list[Processor] = []

    def make(backend: CudaBackend) -> CudaOps:
        ops = OnProcessor.make_ops(backend)  # type: ignore[arg-type]  # which it becomes
        made.append(backend.processor)  # type: ignore[attr-defined]
        return ops

    monkeypatch.setattr(CudaBackend, "probe", staticmethod(lambda: Availability(True, "emulated", emulated=True)))
    monkeypatch.setattr(CudaBackend, "make_ops", make)
    recur = CudaOps.recur

    def unwaiting(ops: CudaOps, *given: Any) -> Any:
        if ops.kernels.recur is not None:  # in the interpreter
            return recur(ops, *given)
        with nothing_waits(monkeypatch):
            return recur(ops, *given)

    monkeypatch.setattr(CudaOps, "recur", unwaiting)
    return made


def texts(folder: Path, backend: str = "gpu_cuda", **changes: Any) -> tuple[dict[str, list[int]], Any]:
    """Return the texts of some requests, and what the engine counted."""
    values = {"dtype": "float32", "max_num_seqs": 2, "num_kv_blocks": 300, "max_model_len": 100, "num_threads": 1}
    config = EngineConfig(
        model=str(folder), backend=backend, max_num_batched_tokens=24, **values | {"block_size": 4} | changes
    )
    random, specs = np.random.default_rng(3), []
    for index, length in enumerate((3, 41, 12)):
        prompt = tuple(random.integers(6, 250, length).tolist())
        params = SamplingParams(temperature=index % 2, seed=index, max_tokens=8)
        specs.append(RequestSpec(request_id=f"r{index}", prompt=prompt, params=params))
    engine = load_engine(config, folder, progress=lambda *_: None, wake=lambda: None)
    try:
        found = run(engine, specs).tokens
        engine.check_integrity()
        return found, engine.stats().scheduler
    finally:
        engine.close()


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("name", "case", "replayed", "changes"),
    [
        ("Llama4", "plain", True, {}),
        ("Llama4", "plain", True, {"speculative": NGRAM}),
        ("Llama4", "plain", False, {"block_size": 5}),
        ("NemotronH", "experts", False, {"speculative": NGRAM, "block_size": 64, "num_kv_blocks": 30}),
        ("Qwen3Next", "plain", False, {"kv_cache_dtype": "int8", "block_size": 100, "num_kv_blocks": 20}),
    ],
)
def test_composed_models_keep_their_texts(
    devices: list[Processor], tmp_path: Path, name: str, case: str, replayed: bool, changes: dict[str, Any]
) -> None:
    fields = {"attention_chunk_size": 8} if name == "Llama4" else {}
    write_config(config_of(name, case, vocab_size=258, **fields), tmp_path, seed=2)
    found, stats = texts(tmp_path, **changes)
    assert (devices[0].replays > 0) == replayed
    assert found == texts(tmp_path, "reference", **changes)[0]
    assert (stats.drafts.proposed > 0) == ("speculative" in changes)


def test_decodes_of_recurrent_layers_are_replayed_with_drafts(
    devices: list[Processor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay computes again, because recordings do not include kernels in the interpreter."""

    def capture(processor: Processor, compute: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            processor.replays += 1
            compute()

        return replay

    monkeypatch.setattr(Processor, "capture", capture)
    monkeypatch.setattr("processor.PLAIN", replace(PLAIN, recur=kernels.recur))
    write_config(config_of("Lfm2", vocab_size=258), tmp_path, seed=2)
    changes = {"speculative": NGRAM, "block_size": 16, "num_kv_blocks": 80}
    found, stats = texts(tmp_path, **changes)
    assert devices[0].replays > 0 and stats.drafts.proposed > 0
    assert found == texts(tmp_path, "reference", **changes)[0]


def write_mtp(name: str, folder: Path) -> None:
    """Write a random model with its layer for multi-token prediction."""
    config = config_of(name, vocab_size=258)
    write_config(config, folder, seed=2)
    family = FAMILIES[name]
    spec = family.mtp(ModelConfig(config).filled(family.defaults, family.renamed))
    assert spec is not None
    values = Values(seed=5)
    more = {tensor: values(*shape, scale=0.3) for tensor, shape in spec.tensors()}
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors", {"format": "pt"})


def test_mtp_layer_drafts_without_changing_texts(devices: list[Processor], tmp_path: Path) -> None:
    write_mtp("DeepSeekV3", tmp_path)
    found, stats = texts(tmp_path, speculative=SpeculativeConfig(method="mtp", num_speculative_tokens=2))
    assert stats.drafts.proposed > 0
    assert found == texts(tmp_path)[0]
