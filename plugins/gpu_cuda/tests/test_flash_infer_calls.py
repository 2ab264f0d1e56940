"""The calls to FlashInfer fit the parameters that its releases have; none of them needs to be installed."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fd_core.ops.contract import Heads, HostStep, Rope  # noqa: E402 - only where torch is installed
from fd_core.ops.torch.attention import TorchLayer  # noqa: E402
from processor import Processor, ids  # noqa: E402

from fd_gpu_cuda.providers import FlashInferAttention  # noqa: E402

GRAPH = (
    "qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf"
)
MADE = f"float_workspace_buffer | kv_layout use_cuda_graph {GRAPH} backend jit_args"
LISTS = "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len"
SIZES = "num_qo_heads num_kv_heads head_dim_qk page_size"
WISHES = "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale"
PLANNED = f"{LISTS} {SIZES} | {WISHES} window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type"
ITEMS = "prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr"
LIMITS = "max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv"
LATER = f"non_blocking {ITEMS} seq_lens seq_lens_q block_tables {LIMITS}"
RUN = "q paged_kv_cache | *args"
SCALED = f"{RUN} q_scale k_scale v_scale out lse return_lse"
RELEASES = {
    "0.2.5": (MADE, f"{PLANNED} non_blocking", f"{RUN} k_scale v_scale out lse return_lse"),
    "0.5.0": (f"{MADE} jit_kwargs", f"{PLANNED} {LATER}", f"{SCALED} enable_pdl window_left sinks"),
    "0.6.12": (
        f"{MADE} jit_kwargs",
        f"{PLANNED} o_data_type {LATER}",
        f"{SCALED} enable_pdl window_left sinks kv_cache_sf skip_softmax_threshold_scale_factor",
    ),
    "0.7.2.post1": (
        f"{MADE} jit_kwargs variant_owns_mask",
        f"{PLANNED} o_data_type {LATER} uniform_q_len",
        f"{SCALED} lse_base lse_layout enable_pdl window_left sinks kv_cache_sf skip_softmax_threshold_scale_factor "
        "use_fp16_softmax uses_spcompress",
    ),
}
"""Parameters of `BatchPrefillWithPagedKVCacheWrapper` in its constructor, `plan` and `run`, from its sources.

Parameters in front of | have no default; those after *args are passed by name.
"""

NUMBERS = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "page_size": 4, "kv_layout": "NHD"}
OPTIONS = {"causal": True, "sm_scale": 0.3, "window_left": 5, "logits_soft_cap": 3.0}


def signature(written: str) -> Signature:
    required, optional = (part.split() for part in written.split("|"))
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter(name, kind) for name in required]
    for name in optional:
        if name.startswith("*"):
            parameters.append(Parameter(name[1:], Parameter.VAR_POSITIONAL))
            kind = Parameter.KEYWORD_ONLY
        else:
            parameters.append(Parameter(name, kind, default=None))
    return Signature(parameters)


def wrapper_of(release: str, calls: list[tuple[str, dict[str, Any]]]) -> type:
    """Return a class with the parameters of a release, which records their values."""

    def method(name: str, written: str) -> Callable[..., Any]:
        def noted(self: Any, *arguments: Any, **named: Any) -> Any:
            given = signature(written).bind(*arguments, **named).arguments
            calls.append((name, given))
            return given.get("q")  # None but for `run`

        return noted

    names = ("__init__", "plan", "run")
    return type("Release", (), {name: method(name, text) for name, text in zip(names, RELEASES[release], strict=True)})


def step() -> Any:
    host = HostStep(ids(0, 1, 4), ids(9, 4), np.array([[7, 2, 5], [3, 0, 0]], np.int32))
    return SimpleNamespace(host=host, query_start=torch.from_numpy(host.query_start), group=0)


def layer() -> TorchLayer:
    return TorchLayer(torch.zeros(32, 2, 8), torch.zeros(32, 2, 8), 4)


HEADS = Heads(4, 2, 8, 0.3, Rope(None, None), window=6, softcap=3.0)


@pytest.mark.parametrize("release", RELEASES)
def test_each_argument_reaches_its_parameter(release: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    flashinfer = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper_of(release, calls))
    attend = FlashInferAttention(flashinfer, Processor())
    q = torch.zeros(4, 4, 8)
    assert attend(q, layer(), HEADS, step()).shape == (4, 32)
    (made, workspace), (planned, plan), (ran, run) = calls
    assert (made, planned, ran) == ("__init__", "plan", "run")
    assert workspace["float_workspace_buffer"].dtype == torch.uint8
    lists = [plan[name].tolist() for name in LISTS.split()]
    assert lists == [[0, 1, 4], [0, 3, 4], [7, 2, 5, 3], [1, 4]]
    found = workspace | plan
    assert {name: found[name] for name in (*NUMBERS, *OPTIONS)} == NUMBERS | OPTIONS
    assert plan["q_data_type"] == plan["kv_data_type"] == q.dtype
    assert [list(part.shape) for part in run["paged_kv_cache"]] == [[8, 4, 2, 8]] * 2
    assert set(run) == {"q", "paged_kv_cache"}


def test_plan_waits_until_the_previous_one_has_read_its_buffer() -> None:
    order: list[str] = []

    class Marking(Processor):
        def mark(self) -> Callable[[], None]:
            order.append("mark")
            return lambda: order.append("wait")

    class Planning(wrapper_of("0.2.5", [])):  # type: ignore[misc]
        def plan(self, *arguments: Any, **named: Any) -> None:
            order.append("plan")

    attend = FlashInferAttention(SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Planning), Marking())
    for now in (step(), step()):
        for _ in range(2):
            attend(torch.zeros(4, 4, 8), layer(), HEADS, now)
    assert order == ["plan", "mark", "wait", "plan", "mark"]
