"""Names, types and labels of every metric are a public contract: external dashboards and alerts use them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from prometheus_client import Metric

from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.engine.process.messages import EngineStats, LeaseStats
from fd_core.ops.compilations import CompilationStats
from fd_core.runner.observing import ObserverStats
from fd_core.runner.sampling.grammars import MaskStats
from fd_core.scheduling.contract import SchedulerStats
from fd_core.scheduling.operations.kv_offloading import Pace
from fd_core.scheduling.operations.kv_transferring import TransferCounters
from fd_core.scheduling.phases import PhaseCounters
from fd_core.server.state import ServerMetrics
from fd_core.structured.compiler import CompilerStats
from fd_core.types import AdapterInfo
from fd_core.types.metrics import declared_metrics
from tests.server.fakes import FakeClient, live, samples
from tests.server.test_kv_metrics import KV

PROMISED = {
    "fdcore": ("info", ["architecture", "backend", "device", "dtype", "model", "version"]),
    "fdcore_accept_errors": ("counter", []),
    "fdcore_active_requests": ("gauge", []),
    "fdcore_adapter_generated_tokens": ("counter", ["adapter"]),
    "fdcore_adapter_generations": ("counter", ["adapter"]),
    "fdcore_background_failures": ("counter", []),
    "fdcore_bodies_refused": ("counter", []),
    "fdcore_body_memory_bytes": ("gauge", []),
    "fdcore_budget_limit_tokens": ("counter", []),
    "fdcore_budget_used_tokens": ("counter", []),
    "fdcore_connections": ("gauge", []),
    "fdcore_connections_closed": ("counter", ["reason"]),
    "fdcore_connections_limit": ("gauge", []),
    "fdcore_connections_refused": ("counter", []),
    "fdcore_connections_refused_of_address": ("counter", []),
    "fdcore_decode_seconds": ("histogram", []),
    "fdcore_drafts_accepted_per_position_tokens": ("counter", ["position"]),
    "fdcore_drafts_accepted_tokens": ("counter", []),
    "fdcore_drafts_proposed_per_position_tokens": ("counter", ["position"]),
    "fdcore_drafts_proposed_tokens": ("counter", []),
    "fdcore_end_to_end_seconds": ("histogram", []),
    "fdcore_engine_epoch": ("gauge", []),
    "fdcore_engine_finished": ("counter", ["reason"]),
    "fdcore_engine_start_failures": ("counter", []),
    "fdcore_engine_up": ("gauge", []),
    "fdcore_forced_accepted_tokens": ("counter", []),
    "fdcore_forced_drafted_tokens": ("counter", []),
    "fdcore_generated_tokens": ("counter", []),
    "fdcore_generations": ("counter", ["outcome"]),
    "fdcore_grammar_cache_hits": ("counter", []),
    "fdcore_grammar_compile_seconds": ("counter", []),
    "fdcore_grammar_mask_seconds": ("counter", []),
    "fdcore_grammar_mask_wait_seconds": ("counter", []),
    "fdcore_grammar_masks": ("counter", []),
    "fdcore_grammars_cached": ("gauge", []),
    "fdcore_grammars_compiled": ("counter", []),
    "fdcore_grammars_refused": ("counter", []),
    "fdcore_http_answers": ("counter", ["path", "status"]),
    "fdcore_inter_token_seconds": ("histogram", []),
    "fdcore_kernel_compilation_seconds": ("counter", ["phase"]),
    "fdcore_kernel_compilations": ("counter", ["phase"]),
    "fdcore_key_refusals": ("counter", ["key", "limit"]),
    "fdcore_kv_blocks": ("gauge", []),
    "fdcore_kv_blocks_cached": ("gauge", []),
    "fdcore_kv_blocks_fenced": ("gauge", []),
    "fdcore_kv_blocks_used": ("gauge", []),
    "fdcore_kv_copy_errors": ("counter", []),
    "fdcore_kv_declined_loads": ("counter", []),
    "fdcore_kv_declined_tokens": ("counter", []),
    "fdcore_kv_fetch_seconds": ("counter", []),
    "fdcore_kv_fetched_bytes": ("counter", []),
    "fdcore_kv_fetched_tokens": ("counter", []),
    "fdcore_kv_found_blocks": ("counter", ["tier"]),
    "fdcore_kv_host_blocks": ("gauge", []),
    "fdcore_kv_host_bytes": ("gauge", []),
    "fdcore_kv_host_limit_bytes": ("gauge", []),
    "fdcore_kv_leases_ended": ("counter", ["how"]),
    "fdcore_kv_leases_open": ("gauge", []),
    "fdcore_kv_leases_refused": ("counter", ["reason"]),
    "fdcore_kv_loaded_tokens": ("counter", ["tier"]),
    "fdcore_kv_loads": ("counter", []),
    "fdcore_kv_loads_expired": ("counter", []),
    "fdcore_kv_lookups": ("counter", []),
    "fdcore_kv_lookups_expired": ("counter", []),
    "fdcore_kv_lost_tokens": ("counter", []),
    "fdcore_kv_operations_open": ("gauge", []),
    "fdcore_kv_pace_host_block_seconds": ("gauge", []),
    "fdcore_kv_pace_prefill_token_seconds": ("gauge", []),
    "fdcore_kv_pace_store_block_seconds": ("gauge", []),
    "fdcore_kv_restored_tokens": ("counter", []),
    "fdcore_kv_saved_tokens": ("counter", []),
    "fdcore_kv_saves_expired": ("counter", []),
    "fdcore_kv_sent_blocks": ("counter", []),
    "fdcore_kv_sent_bytes": ("counter", []),
    "fdcore_kv_store_breaker": ("gauge", ["state", "way"]),
    "fdcore_kv_store_damaged": ("counter", ["reason"]),
    "fdcore_kv_store_dropped_blocks": ("counter", []),
    "fdcore_kv_store_failures": ("counter", ["reason", "trouble"]),
    "fdcore_kv_store_pending_bytes": ("gauge", []),
    "fdcore_kv_store_written_blocks": ("counter", []),
    "fdcore_kv_transfer_dropped_frames": ("counter", []),
    "fdcore_kv_usage_ratio": ("gauge", []),
    "fdcore_max_tokens": ("histogram", []),
    "fdcore_observer_dropped_steps": ("counter", []),
    "fdcore_observer_failures": ("counter", []),
    "fdcore_observer_steps": ("counter", []),
    "fdcore_preemptions": ("counter", []),
    "fdcore_prefill_seconds": ("histogram", []),
    "fdcore_prefills_elsewhere": ("counter", ["outcome"]),
    "fdcore_prefix_hits_tokens": ("counter", []),
    "fdcore_prefix_queries_tokens": ("counter", []),
    "fdcore_prompt_length_tokens": ("histogram", []),
    "fdcore_prompt_tokens": ("counter", []),
    "fdcore_queue_seconds": ("histogram", []),
    "fdcore_rank_failures": ("counter", ["rank"]),
    "fdcore_recomputed_tokens": ("counter", []),
    "fdcore_request_seconds": ("counter", ["phase"]),
    "fdcore_requests_loading": ("gauge", []),
    "fdcore_requests_requeued": ("counter", []),
    "fdcore_requests_running": ("gauge", []),
    "fdcore_requests_waiting": ("gauge", []),
    "fdcore_stale_outputs": ("counter", []),
    "fdcore_steps": ("counter", []),
    "fdcore_slots_draining": ("gauge", []),
    "fdcore_take_backs_in_flight": ("gauge", []),
    "fdcore_text_length_tokens": ("histogram", []),
    "fdcore_time_per_token_seconds": ("histogram", []),
    "fdcore_time_to_first_token_seconds": ("histogram", []),
    "fdcore_tls_handshakes_failed": ("counter", []),
}

MODEL = ["engine", "model_name"]
VLLM = {
    "vllm:cache_config_info": ("gauge", ["block_size", "cache_dtype", "engine", "num_gpu_blocks"]),
    "vllm:e2e_request_latency_seconds": ("histogram", MODEL),
    "vllm:generation_tokens": ("counter", MODEL),
    "vllm:inter_token_latency_seconds": ("histogram", MODEL),
    "vllm:gpu_cache_usage_perc": ("gauge", MODEL),
    "vllm:kv_cache_usage_perc": ("gauge", MODEL),
    "vllm:num_preemptions": ("counter", MODEL),
    "vllm:num_requests_running": ("gauge", MODEL),
    "vllm:num_requests_waiting": ("gauge", MODEL),
    "vllm:prefix_cache_hits": ("counter", MODEL),
    "vllm:prefix_cache_queries": ("counter", MODEL),
    "vllm:prompt_tokens": ("counter", MODEL),
    "vllm:request_decode_time_seconds": ("histogram", MODEL),
    "vllm:request_generation_tokens": ("histogram", MODEL),
    "vllm:request_max_num_generation_tokens": ("histogram", MODEL),
    "vllm:request_params_max_tokens": ("histogram", MODEL),
    "vllm:request_prefill_time_seconds": ("histogram", MODEL),
    "vllm:request_prompt_tokens": ("histogram", MODEL),
    "vllm:request_queue_time_seconds": ("histogram", MODEL),
    "vllm:request_success": ("counter", ["engine", "finished_reason", "model_name"]),
    "vllm:request_time_per_output_token_seconds": ("histogram", MODEL),
    "vllm:spec_decode_num_accepted_tokens": ("counter", MODEL),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("counter", ["engine", "model_name", "position"]),
    "vllm:spec_decode_num_draft_tokens": ("counter", MODEL),
    "vllm:time_per_output_token_seconds": ("histogram", MODEL),
    "vllm:time_to_first_token_seconds": ("histogram", MODEL),
}
"""Named and labelled like vLLM's, so that dashboards for vLLM work."""


def families(leases: LeaseStats, vllm_model: str | None = None) -> list[Metric]:
    """Return all metrics of a server whose engine reports every statistic."""
    client = FakeClient()
    client.rank_failures = {"1": 1}
    client.info = msgspec.structs.replace(client.info, adapters=(AdapterInfo("sql", "digest", "/sql", 8),))
    client.stats = EngineStats(
        kv=KV,
        leases=leases,
        observer=ObserverStats(),
        grammars=CompilerStats(),
        masks=MaskStats(),
        compilations=CompilationStats(),
        scheduler=SchedulerStats(
            pace=Pace(),
            drafts=client._statistics().scheduler.drafts,
            transfers=TransferCounters(),
            phases=PhaseCounters(),
        ),
    )
    metrics = ServerMetrics(client, vllm_model, refusals={("alice", "tokens"): 1})
    metrics.answers["/health", 200] = 1
    return list(metrics.collect())


def labels(family: Metric) -> list[str]:
    return sorted({label for each in family.samples for label in each.labels} - {"le"})


def served(leases: LeaseStats, vllm_model: str | None = None) -> dict[str, tuple[str, list[str]]]:
    return {family.name: (family.type, labels(family)) for family in families(leases, vllm_model)}


def test_metrics_of_all_roles_match_the_contract() -> None:
    decode = served(LeaseStats(receiver=ReceiverStats()))
    prefill = served(LeaseStats(sender=SenderStats(ended={"confirmed": 1}, refused={"busy": 1})))
    assert decode | prefill == PROMISED


def test_vllm_names_are_added_on_request() -> None:
    both = served(LeaseStats(receiver=ReceiverStats()), "a model")
    assert {name: kind for name, kind in both.items() if name.startswith("vllm:")} == VLLM
    assert both.keys() - VLLM.keys() == served(LeaseStats(receiver=ReceiverStats())).keys()


def test_both_names_have_equal_values() -> None:
    with live(lambda: FakeClient(block_size=16), metrics_names="vllm", served_model_names=("first", "other")) as server:
        for _ in range(3):
            server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5})
        found = samples(server)
    pairs = {
        "vllm:num_preemptions_total[0][first]": "fdcore_preemptions_total",
        "vllm:kv_cache_usage_perc[0][first]": "fdcore_kv_usage_ratio",
        "vllm:time_to_first_token_seconds_count[0][first]": "fdcore_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum[0][first]": "fdcore_inter_token_seconds_sum",
        "vllm:e2e_request_latency_seconds_sum[0][first]": "fdcore_end_to_end_seconds_sum",
        "vllm:request_success_total[0][length][first]": "fdcore_generations_total[length]",
        "vllm:request_prompt_tokens_sum[0][first]": "fdcore_prompt_length_tokens_sum",
    }
    assert {name: found[name] for name in pairs} == {name: found[other] for name, other in pairs.items()}
    assert found["vllm:request_success_total[0][length][first]"] == 3
    assert found["vllm:request_prompt_tokens_sum[0][first]"] == 9
    assert found["vllm:request_generation_tokens_sum[0][first]"] == 15
    assert found["vllm:cache_config_info[16][none][0][40]"] == 1


def test_metrics_page_pairs_the_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate" / "metrics.md").read_text()
    named = {found.removesuffix("_total") for found in re.findall(r"`((?:vllm:|fdcore_)\w+)", page)}
    assert {name for name in named if name.startswith("vllm:")} == VLLM.keys()
    assert {name for name in named if not name.startswith("vllm:")} <= PROMISED.keys()


def test_every_help_is_a_sentence_and_equal_for_each_name() -> None:
    helps: dict[str, set[str]] = {}
    for spec in declared_metrics(EngineStats):
        helps.setdefault(spec.name, set()).add(spec.help)
    assert [name for name, texts in helps.items() if len(texts) > 1] == []
    for family in ServerMetrics(FakeClient()).collect():
        helps.setdefault(family.name.removeprefix("fdcore_"), set()).add(family.documentation)
    texts = [text for each in helps.values() for text in each]
    assert [text for text in texts if not (text[0].isupper() or text[0] == "1") or not text.endswith(".")] == []
