"""The summary that is printed when the server is ready."""

from __future__ import annotations

import io
import json
import shlex
from typing import Any

import msgspec
import pytest
from rich.console import Console

from fd_core.cli.serving.summary import brief, show_brief, show_summary, summary
from fd_core.config import ServerConfig
from fd_core.engine.process.messages import EngineInfo
from fd_core.ops.weights import WeightUse
from fd_core.types import AdapterInfo
from tests.engine.helpers import null_engine


@pytest.fixture(scope="module")
def info() -> EngineInfo:
    engine = null_engine()
    engine.close()
    return engine.info


def rows_of(info: EngineInfo) -> dict[str, str]:
    return dict(summary(info, ServerConfig(), "http://127.0.0.1:8000"))


def test_host_memory_without_a_store(info: EngineInfo) -> None:
    rows = rows_of(info)
    assert rows["KV on the host"] == "512.0 MiB"
    assert rows["KV store"].startswith("none")
    assert rows_of(msgspec.structs.replace(info, host_kv_bytes=0))["KV on the host"] == "none"


def test_kv_dtype_is_shown(info: EngineInfo) -> None:
    assert rows_of(info)["KV cache"].endswith("MB of float32)")
    assert rows_of(msgspec.structs.replace(info, kv_dtype="int8"))["KV cache"].endswith("MB of int8)")


def test_shortened_context_is_explained(info: EngineInfo) -> None:
    assert rows_of(info)["max_model_len"] == f"{info.max_model_len:,}"
    short = msgspec.structs.replace(info, num_kv_blocks=64, block_size=16, max_model_len=1024, model_max_len=8192)
    assert rows_of(short)["max_model_len"] == "1,024, limited by the KV cache; the model supports 8,192"
    limited = msgspec.structs.replace(short, max_model_len=512)
    assert rows_of(limited)["max_model_len"] == "512"


def test_sizes_of_the_backend_are_explained(info: EngineInfo) -> None:
    halved = {"max_num_batched_tokens": "default of chip, divided by 2 to leave memory for KV"}
    rows = rows_of(msgspec.structs.replace(info, max_num_seqs=8, max_num_batched_tokens=4096, size_reasons=halved))
    assert rows["max_num_seqs"] == "8"
    assert rows["max_num_batched_tokens"] == "4,096 (default of chip, divided by 2 to leave memory for KV)"


def test_loaded_adapters_are_named(info: EngineInfo) -> None:
    assert "LoRA adapters" not in rows_of(info)
    served = msgspec.structs.replace(
        info,
        adapters=tuple(AdapterInfo(name, "digest", f"/a/{name}", rank) for name, rank in (("sql", 8), ("chat", 16))),
    )
    assert rows_of(served)["LoRA adapters"] == "sql (rank 8), chat (rank 16)"
    later = msgspec.structs.replace(info, lora_folder="/adapters")
    assert rows_of(later)["LoRA adapters"] == "none yet; more can be loaded from /adapters"


def test_store_is_described_and_a_failed_one_stands_out(info: EngineInfo) -> None:
    well = msgspec.structs.replace(info, kv_store="redis://host:6379/0: redis 7")
    assert rows_of(well)["KV store"] == "redis://host:6379/0: redis 7"
    about = "redis://host:6379/0 is unavailable, KV is recomputed meanwhile: refused"
    badly = msgspec.structs.replace(info, kv_store=about, kv_store_answers=False)
    assert rows_of(badly)["KV store"] == f"WARNING: {about}"
    loud = {}
    for name, each in (("well", well), ("badly", badly)):
        out = io.StringIO()
        show_summary(Console(file=out, force_terminal=True, width=200), list(rows_of(each).items()))
        loud[name] = [line for line in out.getvalue().splitlines() if "\x1b[1;31m" in line]
    assert loud["well"] == []
    assert "is unavailable" in "".join(loud["badly"])


def test_warnings_of_the_backend_stand_out_in_both_summaries(info: EngineInfo) -> None:
    slow = msgspec.structs.replace(info, warnings=("no C compiler; install gcc",))
    assert rows_of(slow)["Speed"] == lines_of(slow, ServerConfig())["Speed"] == "WARNING: no C compiler; install gcc"
    assert "Speed" not in rows_of(info)


def test_weight_formats_are_shown_with_the_reason_for_dequantizing(info: EngineInfo) -> None:
    uses = (
        WeightUse("Q4_K", "Q4_K", False, 6_000_000, 4_125_000),
        WeightUse("Q6_K", "bfloat16", False, 2_000_000, 4_000_000),
        WeightUse("F16", "bfloat16", False, 1_000_000, 2_000_000),
        WeightUse("Q4_K", "bfloat16", True, 500_000, 1_000_000),
    )
    rows = rows_of(msgspec.structs.replace(info, backend="chip", weights=uses, weight_formats=("Q4_K", "Q8_0")))
    assert rows["Weights"].split("; ") == [
        "Q4_K as stored (6.0 M, 4 MB)",
        "Q6_K dequantized to bfloat16 (2.0 M, 4 MB), because chip supports Q4_K, Q8_0",
        "F16 in bfloat16 (1.0 M, 2 MB)",
        "embedding in bfloat16 (0.5 M, 1 MB)",
    ]
    assert "Weights" not in rows_of(info), "a model without weights has no such line"


def lines_of(info: EngineInfo, server: ServerConfig, width: int = 60) -> dict[str, str]:
    out = io.StringIO()
    url = "http://127.0.0.1:8000"
    rows = brief(summary(info, server, url), info, server, url, chat=True, seconds=2.44)
    show_brief(Console(file=out, width=width), rows)
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in out.getvalue().splitlines()}


def test_short_summary_has_a_line_for_each_first_question(info: EngineInfo) -> None:
    roomy = msgspec.structs.replace(info, num_kv_blocks=10_000, max_num_seqs=8, max_model_len=1024)
    roomy = msgspec.structs.replace(roomy, size_reasons={"max_num_seqs": "default of chip"})
    lines = lines_of(roomy, ServerConfig())
    assert list(lines) == ["Model", "Device", "Memory", "Batch", "API", "Try", "Ready"]
    assert lines["Memory"].endswith("for 8 requests of 1,024 tokens")
    assert lines["Batch"] == "up to 8 requests and 64 tokens a step (default of chip)"
    assert lines["API"] == "http://127.0.0.1:8000/v1, page: http://127.0.0.1:8000/"
    assert lines["Ready"].startswith("in 2.4 s; Ctrl-C stops")


def test_short_summary_counts_requests_of_full_length(info: EngineInfo) -> None:
    small = msgspec.structs.replace(info, num_kv_blocks=64, block_size=16, max_model_len=1000)
    assert lines_of(small, ServerConfig())["Memory"].endswith("for 1 request of 1,000 tokens")


def test_short_summary_shows_what_the_user_asked_for_and_failures(info: EngineInfo) -> None:
    unusual = msgspec.structs.replace(info, lora_folder="/adapters", kv_store="no answer", kv_store_answers=False)
    lines = lines_of(unusual, ServerConfig(data_parallel_size=2), width=300)
    assert {"LoRA", "Engines", "KV"} <= set(lines)
    assert "WARNING: no answer" in lines["KV"]


@pytest.mark.parametrize("changes", [{}, {"api_keys": ("s3cret",)}, {"served_model_names": ("it's",)}])
def test_copied_command_is_one_line_that_a_shell_reads(info: EngineInfo, changes: dict[str, Any]) -> None:
    command = shlex.split(lines_of(info, ServerConfig(**changes))["Try"])
    assert command[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(command[-1])["model"] == (*changes.get("served_model_names", ()), info.model)[0]
    assert ("Authorization: Bearer $KEY" in command) == ("api_keys" in changes)
    assert "s3cret" not in " ".join(command)
