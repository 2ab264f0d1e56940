"""Nothing compiles while requests are served. Triton really runs, in a separate process with a driver that launches
nothing; see `fake_driver`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extent import everything

pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.checkpoints import write_checkpoint, write_config
from test_families import FAMILIES, config_of

from fd_gpu_cuda.backend import CudaBackend


def answer(script: str, *words: str, cache: Path) -> Any:
    """Run another script of this folder without the interpreter, and return the last line of its output."""
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"FD_CACHE": str(cache), "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, str(here / script), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_fake_driver_counts_compilations_and_launches_nothing(tmp_path: Path) -> None:
    found, failures, launches, touched = answer("count_small_kernels.py", cache=tmp_path)
    # A count of 1 is a constant, multiples of 16 and addresses that are none are known to the compiler.
    assert found == {"_special": [1, 1, 1, 0, 1, 1], "_plain": [1, 0, 0, 0, 0, 1]}
    assert (failures, launches, touched) == ([], 12, 0.0)


def test_launcher_finds_the_kernel_that_triton_would_choose(tmp_path: Path) -> None:
    launches, looked_up, different = answer("compare_launches.py", cache=tmp_path)
    assert not different
    assert looked_up < launches / 3  # the others were found without Triton


def test_second_start_compiles_nothing_and_late_compilations_are_logged(tmp_path: Path) -> None:
    starts = [answer("count_a_start.py", cache=tmp_path) for _ in range(2)]
    folder = str(tmp_path / "triton")
    assert [found[:3] for found in starts] == [[folder, [1, 0, 0], [2, 0, 1]], [folder, [0, 1, 0], [0, 2, 1]]]
    start, later = starts[0][3]
    assert start.startswith(f"DEBUG compiled 1 kernels and found 0 in {folder}, which took ")
    assert later.startswith("WARNING the kernel _plain was compiled while requests were served, which delayed them by ")


def test_triton_cache_is_in_the_project_cache_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fd_gpu_cuda.compilations import use_cache_folder

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert use_cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "cache"))
    assert use_cache_folder() == tmp_path / "cache" / "triton"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


NGRAM = {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}
ITSELF = {"speculative": {"method": "draft_model", "num_speculative_tokens": 3}}
"""The model drafts for itself."""
HELD: dict[str, Any] = {"lora_modules": ["a={folder}/adapter0", "b={folder}/adapter1"], "max_lora_rank": 20}
"""Adapters that are loaded at start, for some of the requests."""
LOADED: dict[str, Any] = {"lora_folder": "{folder}", "max_loras": 3}
"""Adapters that are loaded and unloaded."""
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma3", {"dtype": "float32", **NGRAM}),
    ("qwen3-moe", {"max_num_seqs": 37, "max_num_batched_tokens": 300, "block_size": 16}),
    ("llama", {"quantization": "int4", "max_num_seqs": 3, "max_num_batched_tokens": 48, **LOADED, **NGRAM}),
    ("llama", {"quantization": "int8", "dtype": "float32", **NGRAM}),
    ("llama", {"kv_cache_dtype": "int8", **HELD}),
    ("llama", ITSELF),
    ("llama", {"attention_backend": "torch"}),
    (
        "llama",
        {
            "max_num_seqs": CudaBackend.default_num_seqs,
            "max_num_batched_tokens": CudaBackend.default_batched_tokens,
            "block_size": 32,
        },
    ),
    ("Qwen3Next", {"block_size": 64, **NGRAM}),
]
"""Checkpoints or families, and settings. Each generates texts, also with log-probabilities, and embeddings."""


@pytest.mark.parametrize(("case", "settings"), SERVED if everything() else SERVED[3:4], ids=str)
def test_nothing_compiles_while_requests_are_served(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if case in FAMILIES:
        write_config(config_of(case, vocab_size=258), folder, seed=1)
    else:
        write_checkpoint(case, folder)
    seed = SERVED.index((case, settings))
    if settings is ITSELF:
        settings = {"speculative": {**ITSELF["speculative"], "model": str(folder)}}
    for number, rank in enumerate((4, 8, 20)) if "lora" in str(settings) else ():
        write_adapter(folder, tmp_path / "adapters" / f"adapter{number}", seed=number, rank=rank)
    words = json.dumps(settings).replace("{folder}", str(tmp_path / "adapters"))
    found = answer("count_compilations.py", str(folder), words, str(seed), cache=tmp_path)
    assert found["launches"] > 100
    assert len(found["at_start"]) > 10
    assert found["later"] == [], f"seed {seed}"
    # The option of each kernel, not the default of this Triton release, which `answer` sets.
    assert {kernel for kernel, fuses in found["fusing"].items() if not fuses} <= {"penalize"}
