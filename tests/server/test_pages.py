"""Models, tokenize, health, version, metrics, page and the OpenAPI document."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import fd_core
from fd_core.http.metrics import Histogram
from tests.server.fakes import LiveServer, live, samples


def test_models_are_listed_under_their_served_names() -> None:
    with live(served_model_names=("main", "org/alias")) as server:
        cards = server.get("/v1/models").json["data"]
        assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
            ("main", "fake", 400),
            ("org/alias", "fake", 400),
        ]
        assert server.get("/v1/models/org/alias").json["id"] == "org/alias"
        assert server.post("/v1/completions", {"prompt": "a"}).json["model"] == "main"
        assert server.post("/v1/completions", {"prompt": "a", "model": "org/alias"}).json["model"] == "org/alias"
        assert server.post("/v1/completions", {"prompt": "a", "model": "fake"}).status == 404


def test_restarted_engine_has_another_system_fingerprint() -> None:
    with live() as server:
        first = server.get("/health").headers["x-instance"]
        assert server.get("/health").headers["x-instance"] == first
        server.client.info = msgspec.structs.replace(server.client.info, epoch=2)
        assert server.get("/health").headers["x-instance"] != first


def test_page_data_is_public_and_contains_no_secrets() -> None:
    with live(api_keys=("topsecretkey",)) as server:
        answered = server.post("/v1/completions", {"prompt": "hidden words"}, Authorization="Bearer topsecretkey")
        assert answered.status == 200
        answer = server.get("/status.json")
        status = answer.json
        assert (status["models"], status["not_ready"]) == (["fake"], None)
        assert status["engine"]["max_num_seqs"] == server.client.info.max_num_seqs
        assert set(status["stats"]["scheduler"]) >= {"slots", "counters", "blocks", "outputs", "drafts"}
        for durations in status["seconds"].values():
            assert len(durations["counts"]) == len(durations["bounds"]) + 1
        assert sum(status["seconds"]["time_to_first_token"]["counts"]) == 1
        assert b"topsecretkey" not in answer.body and b"hidden words" not in answer.body


def test_tokenize_and_detokenize(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json
    assert answer == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 400, "token_strs": ["h", "�", "�"]}
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": "hé"}
    assert server.post("/detokenize", {"tokens": [104, 256]}).json == {"prompt": "h<|end|>"}
    assert server.post("/detokenize", {"tokens": [104, 256], "skip_special_tokens": True}).json == {"prompt": "h"}
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json
    assert bytes(chat["tokens"]) == b"user: x\nassistant: "


def test_version_and_page(server: LiveServer) -> None:
    assert server.get("/version").json == {"version": fd_core.__version__}
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert b"http://" not in page.body and b"https://" not in page.body


def test_metrics_follow_engine_and_streams(server: LiveServer) -> None:
    before = samples(server)
    server.client.per_step = 2
    server.post("/v1/completions", {"prompt": "a", "stream": True})
    after = samples(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("fdcore_generations_total[stop]") == 1
    assert grown("fdcore_time_to_first_token_seconds_count") == 1
    assert grown("fdcore_inter_token_seconds_count") == 12
    assert grown("fdcore_end_to_end_seconds_count") == 1
    assert grown("fdcore_http_answers_total[/v1/completions][200]") == 1
    assert after["fdcore_preemptions_total"] == 3
    for position, (proposed, accepted) in enumerate([(9, 6), (7, 2)]):
        assert after[f"fdcore_drafts_proposed_per_position_tokens_total[{position}]"] == proposed
        assert after[f"fdcore_drafts_accepted_per_position_tokens_total[{position}]"] == accepted
    assert after["fdcore_kv_blocks"] == 40
    assert after["fdcore_engine_up"] == 1
    assert after["fdcore_active_requests"] == 0
    for name in (
        "requests_running",
        "requests_waiting",
        "kv_usage_ratio",
        "slots_draining",
        "prefix_queries_tokens_total",
        "prefix_hits_tokens_total",
        "budget_used_tokens_total",
        "budget_limit_tokens_total",
        "stale_outputs_total",
        "generated_tokens_total",
    ):
        assert f"fdcore_{name}" in after


def test_invented_paths_are_not_labels(server: LiveServer) -> None:
    server.get("/made/up/path")
    server.get("/v1/models/made-up")
    names = samples(server)
    assert not any("made" in name for name in names)
    assert names["fdcore_http_answers_total[other][404]"] >= 1
    assert names["fdcore_http_answers_total[/v1/models/{model:path}][404]"] >= 1


def test_histogram_is_cumulative() -> None:
    histogram = Histogram("h", "text", (1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 1), (1.5, 2), (9.0, 1)):
        histogram.observe(value, times)
    family = histogram.family()
    assert [(s.labels.get("le"), s.value) for s in family.samples if s.name == "h_bucket"] == [
        ("1.0", 2.0),
        ("2.0", 4.0),
        ("+Inf", 5.0),
    ]
    assert {s.name: s.value for s in family.samples if s.name != "h_bucket"} == {"h_count": 5.0, "h_sum": 13.5}


def test_openapi_describes_every_endpoint_with_limits(server: LiveServer) -> None:
    document = server.get("/openapi.json").json
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{response_id}"),
        "/v1/responses/input_tokens",
        *("/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank", "/pooling"),
        "/v1/models",
        "/v1/models/{model}",
        *("/v1/requests", "/v1/abort_requests", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/v1/pause", "/v1/resume", "/v1/control", "/v1/reset_prefix_cache", "/v1/update_weights"),
        *("/v1/sleep", "/v1/wake_up"),
        *("/api/chat", "/api/embed", "/api/generate", "/api/ps", "/api/show", "/api/tags", "/api/version"),
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/ready",
        "/load",
        "/version",
        "/get_model_info",
    }
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert {"200", "400", "401", "413", "415", "503"} <= set(operation["responses"])


def test_every_body_has_an_example_that_works(tmp_path: Path) -> None:
    with live(batch_api=True, batch_store=str(tmp_path)) as server:
        paths = server.get("/openapi.json").json["paths"]
        bodies = {
            path: each["post"]["requestBody"] for path, each in paths.items() if "requestBody" in each.get("post", {})
        }
        refused = {}
        for path, body in bodies.items():
            answer = server.post(path, body["content"]["application/json"]["example"])
            if answer.status != 200:
                refused[path] = answer.status
    # Loading files at run time needs the operator's permission, a batch its file, and a class a classifier.
    forbidden = dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/update_weights"), 403)
    assert refused == forbidden | {"/v1/batches": 400, "/v1/classify": 400}


def test_api_docs_page_is_self_contained(server: LiveServer) -> None:
    page = server.get("/docs")
    assert (page.status, page.headers["content-type"].split(";")[0]) == (200, "text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert b"http://" not in page.body and b"https://" not in page.body


def test_history_is_public_and_names_its_columns(server: LiveServer) -> None:
    answer = server.get("/history.json")
    history = answer.json
    assert history["columns"][0] == "at" and len(history["rows"]) >= 1
    for row in history["rows"]:
        sample = dict(zip(history["columns"], row, strict=True))
        assert history["now"] - 600 < sample["at"] <= history["now"]
        assert (sample["running"], sample["waiting"]) == (0, 0)


def test_load_and_model_info_match_other_servers(server: LiveServer) -> None:
    assert server.get("/load").json == {"server_load": 0, "running": 0, "waiting": 0}
    found = server.get("/get_model_info").json
    assert (found["model_path"], found["is_generation"], found["max_model_len"]) == ("fake", True, 400)
    assert server.post("/ping", {}).json == server.get("/ping").json == {"status": "ok", "reason": None}


@pytest.mark.parametrize("path", ["/health", "/", "/metrics", "/v1/models", "/openapi.json"])
def test_head_is_get_without_a_body(server: LiveServer, path: str) -> None:
    whole, head = server.get(path), server.request("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(whole.body))


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/health", "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", "OPTIONS, POST"),
        ("/v1/models/some/name", "GET, HEAD, OPTIONS"),
        ("/ping", "GET, HEAD, OPTIONS, POST"),
        ("/v1/responses/resp_1", "DELETE, GET, HEAD, OPTIONS"),
    ],
)
def test_options_names_the_methods_of_a_path(server: LiveServer, path: str, methods: str) -> None:
    answer = server.request("OPTIONS", path)
    assert (answer.status, answer.headers["allow"], answer.body) == (204, methods, b"")
    other = server.request("PATCH", path)
    assert (other.status, other.headers["allow"]) == (405, methods)
    assert server.request("OPTIONS", "/nothing").status == 404
    assert server.request("HEAD", "/v1/chat/completions").status == 405


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_is_json(server: LiveServer, path: str) -> None:
    assert server.get(path).json == {"status": "ok", "reason": None}


def test_tokenizer_info_requires_permission_of_the_operator(server: LiveServer) -> None:
    refused = server.get("/tokenizer_info")
    assert (refused.status, refused.json["error"]["code"]) == (404, "not_enabled")
    assert "--enable-tokenizer-info-endpoint" in refused.json["error"]["message"]
    with live(enable_tokenizer_info_endpoint=True) as allowed:
        info = allowed.get("/tokenizer_info").json
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["bos_token"], info["eos_token"]) == (None, "<|end|>")
    assert (info["vocab_size"], info["model_max_length"]) == (257, 400)
    assert info["added_tokens_decoder"]["256"] == {
        **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False),
        "content": "<|end|>",
        "special": True,
    }
    assert "messages" in info["chat_template"]
