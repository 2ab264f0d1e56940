"""Axes of an engine: its settings, its requests, and events between its steps; each case against the oracle's texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.engine.process.messages import ControlOrder, PauseGeneration, ResumeGeneration, Sleep, WakeUp
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import spec_of
from fd_core.ops.contract import KV_TYPES
from fd_core.testing.axes.covering import Axis, Case, Value, default_case, int_of
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.kit.judging import Judge
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.checkpoints import ENCODER, STEP_CASE, abilities_of, is_tied
from fd_core.testing.models.scenario import Events, Scenario
from fd_core.testing.models.texts import POOLINGS
from fd_core.types import Pooling, Reasoning, RequestSpec, SamplingParams

AXES: Final = (
    # Settings.
    Axis(
        "slots",
        (4, 1, 2, 3, 17, 33),
        ("EngineConfig.max_num_seqs", "Limits.max_num_seqs", "Admission.slot", "StepPlan.slots"),
        rare=({"slots": 260, "requests": 260, "prompt": 1, "max_tokens": 2, "budget": 700},),
    ),
    Axis(
        "budget",
        (64, 0, 7, 33, 300),
        ("EngineConfig.max_num_batched_tokens", "Limits.max_num_batched_tokens", "StepPlan.num_tokens"),
    ),
    Axis(
        "block_size",
        (4, 1, 5, 16, 32, 64),
        ("EngineConfig.block_size", "Limits.block_size"),
        rare=({"block_size": 4096},),
    ),
    Axis(
        "memory",
        ("ample", "recomputed", "restored"),
        (
            "EngineConfig.num_kv_blocks",
            "Limits.num_kv_blocks",
            "EngineConfig.save_preempted_kv",
            "EngineConfig.host_kv_memory",
            "StepPlan.grants",
            "StepPlan.revocations",
        ),
    ),
    Axis("room", (9, 0, -3), ("EngineConfig.max_model_len", "Limits.max_model_len")),
    Axis("depth", (1, 2, 3, 16), ("EngineConfig.pipeline_depth", "Limits.pipeline_depth")),
    Axis("threads", (1, 3), ("EngineConfig.num_threads",)),
    Axis("prefix_caching", (True, False), ("EngineConfig.enable_prefix_caching",)),
    Axis("drafts", (0, 1, 3, 5, 16), ("EngineConfig.speculative", "Limits.max_drafts", "StepPlan.num_drafts")),
    Axis("wrong_drafts", (0.3, 0.0, 0.1, 1.0)),
    Axis(
        "drafter",
        ("texts", "model"),
        rare=({"drafter": "model", "drafts": 5, "wrong_drafts": 0.0, "max_tokens": 33, "ends": "last first"},),
        needs="checkpoints",
    ),
    Axis("structured", (False, True), ("EngineConfig.structured_output",)),
    Axis("forced", (8, 0, 16), ("EngineConfig.max_forced_tokens",)),
    Axis("transport", ("memory", "zmq"), ("EngineConfig.output_transport",)),
    Axis(
        "model",
        ("llama", "mistral-window", "qwen2-window", "gemma3", "qwen2", "qwen3-moe", "ernie-moe", ENCODER),
        ("EngineConfig.model", "Limits.groups"),
        needs="checkpoints",
    ),
    Axis("stored", ("F32", "BF16", "F16"), needs="checkpoints"),
    Axis("weights", ("auto", "int8", "int4"), ("EngineConfig.quantization",), needs="checkpoints"),
    Axis("kv_dtype", ("auto", *KV_TYPES), ("EngineConfig.kv_cache_dtype",)),
    Axis(
        "adapters",
        (0, 1, 2, 8),
        ("EngineConfig.lora_modules", "EngineConfig.max_loras", "RequestSpec.adapter", "Admission.adapter"),
        needs="checkpoints",
    ),
    Axis(
        "adapter_rank",
        (8, 1, 64),
        ("EngineConfig.max_lora_rank",),
        rare=({"adapters": 2, "adapter_rank": 512},),
        needs="checkpoints",
    ),
    Axis("reloaded", (False, True), needs="checkpoints"),
    # Requests. Two of three have a value, others of the same batch the plainest one; a single one always has it.
    Axis("requests", (5, 1, 2, 3, 9, 24), ("RequestSpec.request_id", "Admission.request_id", "StepPlan.admissions")),
    Axis(
        "prompt",
        (9, 1, 2, 4, 16, 31, 32, 64, 127),
        ("RequestSpec.prompt", "Admission.token_ids", "Admission.prompt_len", "StepPlan.starts", "StepPlan.samples"),
        rare=(
            {"prompt": 1100, "budget": 3000, "prompt_logprobs": 1, "requests": 1},
            {"prompt": 2049, "budget": 3000, "pooling": "mean", "requests": 1, "block_size": 32},
            {"prompt": 1100, "budget": 3000, "pooling": "tokens", "requests": 1, "arrivals": 1},
        ),
    ),
    Axis("shared_prefix", (0, 8, 21), ("Admission.computed",)),
    Axis("salts", (1, 2), ("RequestSpec.cache_salt",)),
    Axis("max_tokens", (12, 1, 2, 3, 33), ("SamplingParams.max_tokens",)),
    Axis("ends", ("together", "last first", "first first", "first stays", "last stays")),
    Axis("min_tokens", (0, 1, 6, 2**31 - 1), ("SamplingParams.min_tokens",)),
    Axis("eos_ids", (0, 1, 2, 9), ("RequestSpec.eos_token_ids", "Admission.eos_token_ids")),
    Axis("stop_ids", (0, 1, 2, 5, 40), ("SamplingParams.stop_token_ids",)),
    Axis("ignore_eos", (False, True), ("SamplingParams.ignore_eos",)),
    Axis("temperature", (0.0, 1.0, 0.01, 2.0), ("SamplingParams.temperature",)),
    Axis("top_k", (0, 1, 2, 50, 2**31 - 1), ("SamplingParams.top_k",)),
    Axis("top_p", (1.0, 0.0, 0.5, 0.999), ("SamplingParams.top_p",)),
    Axis("min_p", (0.0, 0.05, 1.0), ("SamplingParams.min_p",)),
    Axis("seed", (0, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1), ("SamplingParams.seed",)),
    Axis("presence", (0.0, 1.5, -2.0), ("SamplingParams.presence_penalty",)),
    Axis("frequency", (0.0, 0.7, -2.0), ("SamplingParams.frequency_penalty",)),
    Axis("repetition", (1.0, 1.3, 0.5, 10.0), ("SamplingParams.repetition_penalty",)),
    Axis("biases", (0, 1, 30, 120), ("SamplingParams.logit_bias",)),
    Axis("allowed", (None, 1, 60, 120), ("SamplingParams.allowed_token_ids",)),
    Axis("banned", (0, 1, 2, 3), ("SamplingParams.bad_words_token_ids",)),
    Axis("logprobs", (None, 0, 1, 20), ("SamplingParams.logprobs",)),
    Axis("prompt_logprobs", (None, 0, 1, 20), ("SamplingParams.prompt_logprobs",)),
    Axis("reasoning", (None, 0, 3), ("SamplingParams.reasoning",)),
    Axis("pooling", (None, *POOLINGS), ("RequestSpec.pooling", "Admission.pooling")),
    Axis("delivered", (0, 1, 5), ("RequestSpec.delivered",)),
    # Events.
    Axis("arrivals", (0, 1, 4)),
    Axis("abort", (None, 0, 1, 2, 3, 5, 8)),
    Axis("poisoned", (False, True)),
    Axis("ordered", (None, "pause", "nap", "sleep", "update")),
    Axis("again", (False, True)),
    Axis("copies", (False, True), needs="kv_transfer"),
    Axis("company", ("none", "in turns", "in a thread")),
    Axis("neighbour", ("alike", "unlike", "unlike first"), ("EngineConfig.dtype",)),
    Axis(
        "first_number",
        (0, 2**15 - 3, 2**16 - 3, 2**31 - 2000),
        ("StepPlan.step", "StepPlan.epoch", "StepPlan.gens", "Admission.gen"),
    ),
    Axis("attention", ("auto", "triton", "flashinfer", "torch"), ("EngineConfig.attention_backend",)),
)
"""Axes of an engine and its requests. `drafter`: the oracle's texts, or a draft model; `stored`: dtype of a checkpoint,
in two files unless it is float32; `abort` is the step after which two requests are aborted; `poisoned` adds a
request whose prompt is NaN inside the model; `ordered` is an order of an operator: to replace other weights before the
first step, or another one after a few steps, for which all requests are preempted, such as to sleep, after a `nap` with
the same weights; `again` submits all requests a
second time, under the same names; `company` is another engine of the same backend in this process; an `unlike`
`neighbour` has another value of each setting, and one that is `first` is built before; with `reloaded`, another adapter
takes the place of the first one when all requests have ended."""
_ELSEWHERE: Final = "other kits vary it; a backend does not see it"
_START: Final = "it chooses what is loaded; a case uses the target's"
_IMAGES: Final = "the kit of model families computes prompts with images"
EXCUSED: Final[Mapping[str, str]] = {
    "RequestSpec.params": "its fields are axes",
    "RequestSpec.images": _IMAGES,
    "Admission.images": _IMAGES,
    "Limits.max_image_tokens": _IMAGES,
    "Limits.whole_images": _IMAGES,
    "Admission.params": "its fields are axes",
    "SamplingParams.grammar": "the kit's models have no tokenizer; its masks are those of `reasoning`",
    "RequestSpec.priority": _ELSEWHERE,
    "RequestSpec.tenant": _ELSEWHERE,
    "RequestSpec.prefill_at": _ELSEWHERE,
    "RequestSpec.prefill_job": _ELSEWHERE,
    "RequestSpec.traceparent": _ELSEWHERE,
    "Limits.vocab_size": "a model has it; `test_steps` has a large one",
    "Limits.num_stages": "stages of a pipeline; see `test_ranks`",
    "EngineConfig.generation_config": _ELSEWHERE,
    "EngineConfig.override_generation_config": _ELSEWHERE,
    "EngineConfig.tensor_parallel_size": "see `test_ranks`",
    "EngineConfig.pipeline_parallel_size": "see `test_ranks`",
    "EngineConfig.enable_expert_parallel": "see `test_ranks`",
    "EngineConfig.distributed_executor_backend": "see `test_ranks`",
    "EngineConfig.rank_transport": "see `test_ranks`",
    **{
        f"EngineConfig.{name}": _START
        for name in (
            *("revision", "model_impl", "language_model_only", "backend", "postprocess"),
            *("native_kernels", "kv_cache_memory", "gpu_memory_utilization"),
        )
    },
    **{
        f"EngineConfig.{name}": _ELSEWHERE
        for name in (
            *("scheduler", "scheduling_policy", "victim_policy", "observer", "pooling", "watchdog_seconds"),
            *(
                "restart_attempts",
                "lora_folder",
                "weights_folder",
                "kv_store",
                "kv_store_timeout",
                "kv_store_secret_file",
            ),
            *("kv_store_compression", "role", "kv_connector", "transfer_host", "transfer_port"),
            *("transfer_secret_file", "lease_seconds", "kv_events", "trace", "trace_limit"),
        )
    },
}
"""Fields of the contract that no axis varies, with the reason."""
EXACT_ONLY: Final = ("temperature", "repetition", "reasoning")
"""Axes whose effect on a text is indistinguishable from rounding in lower precision, as the choice of experts is."""
_OF_DECODERS: Final = ("memory", "drafts", "structured", "kv_dtype", "adapters", "copies", "delivered", "poisoned")
"""Axes of which encoders have the plainest value."""
VOCABULARY: Final = 131
"""Of the model; tokens of the requests are below, and the last one is NaN."""
_GROUPS: Final = {"qwen2-window": 2, "gemma3": 2}
"""Groups of layers of models with some layers that have a window; each takes blocks for a request."""
_SLACK: Final = 4.0
"""The model has two layers and adapters, and a case compares thousands of tokens; logits of other rows differ by ten
times the margin and more."""
_MOST_TOKENS: Final = 1200
"""Tokens of all requests of a case that is not rare."""
_MOST_STEPS: Final = 400
_MOST_FILLED: Final = 1000
"""Longest context of which further requests fill the pool; attention to longer ones takes seconds in numpy."""


def allowed(case: Case) -> bool:
    """Return True if an engine can have these settings, and the oracle computes the requests in about a second."""
    if case["reasoning"] is not None and not (case["structured"] or case["drafts"]):
        return False
    if case["reloaded"] and not case["adapters"]:
        return False
    if case["drafter"] == "model" and int_of(case, "drafts") > 5:  # each draft is a forward pass
        return False
    if case["model"] == ENCODER and (
        case["pooling"] == "tokens"
        or _prompt(case) + 2 > _budget(case)
        or any(case[name] != _PLAIN[name] for name in _OF_DECODERS)
    ):
        return False
    if case["poisoned"] and is_tied(str(case["model"])):  # logits of the token would be NaN for all
        return False
    has_experts = "moe" in abilities_of(str(case["model"]))
    if case["weights"] != "auto" and (has_experts or any(case[name] != _PLAIN[name] for name in EXACT_ONLY)):
        return False
    if case["neighbour"] != "alike" and case["company"] == "none":
        return False
    if case["copies"] and case["memory"] == "restored":  # which copies on a thread of its own, one at a time
        return False
    if case["memory"] != "ample" and not _is_preempted(case):
        return False
    prompts = int_of(case, "requests") * _prompt(case)
    texts = int_of(case, "requests") * (int_of(case, "max_tokens") + 5)
    steps = prompts / _budget(case) + texts / min(int_of(case, "requests"), int_of(case, "slots"), _budget(case))
    steps *= (1 if case["company"] == "none" else 3) * (2 if case["again"] else 1)
    return prompts + texts < _MOST_TOKENS and steps < _MOST_STEPS


def settings_of(case: Case, longest: int) -> dict[str, Any]:
    """Return the settings of the engine; `longest` is the number of tokens of the longest request."""
    context = max(longest + int_of(case, "room"), 8)
    needed = -(-context // int_of(case, "block_size"))
    running = min(int_of(case, "slots"), int_of(case, "requests"))
    blocks = running * needed if case["memory"] == "ample" else max(needed, _pool_of_prompts(case))
    return {
        "max_num_seqs": case["slots"],
        "max_num_batched_tokens": _budget(case),
        "block_size": case["block_size"],
        "num_kv_blocks": _GROUPS.get(str(case["model"]), 1) * blocks,
        "max_model_len": context,
        "pipeline_depth": case["depth"],
        "num_threads": case["threads"],
        "enable_prefix_caching": case["prefix_caching"],
        "structured_output": case["structured"] or bool(case["drafts"]),
        "max_forced_tokens": case["forced"],
        "output_transport": case["transport"],
        "attention_backend": case["attention"],
        "save_preempted_kv": case["memory"] == "restored",
        "host_kv_memory": 2**24 if case["memory"] == "restored" else 0,
    }


def _is_preempted(case: Case) -> bool:
    """Return True if several requests run together whose prompts fill the memory, and then need more blocks."""
    running = min(int_of(case, "requests"), int_of(case, "slots"))
    together = running >= 3 and running * _prompt(case) <= 4 * _budget(case) and int_of(case, "arrivals") <= 1
    whole = case["abort"] is None and case["pooling"] is None and int_of(case, "stop_ids") <= 5
    more = int_of(case, "max_tokens") - 2 * int_of(case, "drafts") - int_of(case, "delivered")
    return together and whole and _blocks(case, more) > _blocks(case, 1)


def _pool_of_prompts(case: Case) -> int:
    """Return the blocks of the prompts of all running requests."""
    running, shared = min(int_of(case, "requests"), int_of(case, "slots")), 0
    if case["prefix_caching"]:
        shared = int_of(case, "shared_prefix") // int_of(case, "block_size")
    kinds = min(running, int_of(case, "salts") * (1 + int_of(case, "adapters")))
    return kinds * shared + running * (_blocks(case, 1) - shared)


def _prompt(case: Case) -> int:
    return int_of(case, "prompt") + int_of(case, "shared_prefix")


def _blocks(case: Case, more: int) -> int:
    """Return the blocks of a prompt and some tokens after it."""
    return -(-(_prompt(case) + more) // int_of(case, "block_size"))


def _budget(case: Case) -> int:
    return max(int_of(case, "budget"), 1 + int_of(case, "drafts"))


def sizes_of(case: Case) -> Mapping[str, int]:
    """Return the sizes of a case under the names of `OperatingEnvelope`."""
    forced = min(int_of(case, "forced"), _budget(case) - 1) if case["structured"] else 0
    return {
        "max_num_seqs": int_of(case, "slots"),
        "max_num_batched_tokens": _budget(case),
        "max_model_len": 1
        + sum(int_of(case, each) for each in ("prompt", "shared_prefix", "max_tokens", "requests"))
        + 9
        + int_of(case, "room"),
        "block_size": int_of(case, "block_size"),
        "max_drafts": int_of(case, "drafts") or forced,
        "pipeline_depth": int_of(case, "depth"),
        "max_loras": int_of(case, "adapters"),
        "max_lora_rank": int_of(case, "adapter_rank") if case["adapters"] else 0,
    }


EDGES: Final[Mapping[str, Edge]] = {
    "max_num_seqs": Edge("slots"),
    "max_num_batched_tokens": Edge("budget", {"prompt": 127}),
    "max_model_len": Edge("prompt", {"requests": 1, "budget": 300}),
    "block_size": Edge("block_size"),
    "max_drafts": Edge("drafts", {"budget": 300}),
    "pipeline_depth": Edge("depth"),
    "max_loras": Edge("adapters"),
    "max_lora_rank": Edge("adapter_rank", {"adapters": 1}),
}


def requests_of(case: Case, digests: tuple[str, ...], first: int = 0) -> list[RequestSpec]:
    """Return the requests of a case, numbered from `first`; adapters have the given digests."""
    return [_request(case, first + index, digests) for index in range(int_of(case, "requests"))]


_PLAIN: Final = default_case(AXES)
_CHANGE_TEXTS: Final = [
    axis
    for axis in AXES
    if axis.name in ("pooling", "adapters", "poisoned", "ordered", "reasoning")
    or (axis.fields and axis.fields[0].startswith("SamplingParams.") and axis.name != "max_tokens")
]
"""Axes of which a value but the plainest lets a text differ from the most likely one of the model."""
_ORDER: Final = {name: place for place, name in enumerate(_PLAIN)}


def _request(case: Case, index: int, digests: tuple[str, ...]) -> RequestSpec:
    rng = np.random.default_rng([index, 77])

    def value(name: str) -> Any:
        return case[name] if case["requests"] == 1 or (index + _ORDER[name]) % 3 else _PLAIN[name]

    def some(count: int, of: int = VOCABULARY - 1) -> tuple[int, ...]:
        return tuple(rng.permutation(of)[:count].tolist())

    length = max(1, int_of(case, "prompt") + (0, 1, -1)[index % 3])
    prompt = [(5 * place) % 90 for place in range(int_of(case, "shared_prefix"))]
    prompt += rng.integers(0, VOCABULARY - 1, length).tolist()
    biased, stops, ends, kept = some(value("biases")), some(value("stop_ids")), some(value("eos_ids")), value("allowed")
    params = SamplingParams(
        max_tokens=_tokens_of(case, index),
        min_tokens=min(value("min_tokens"), _tokens_of(case, index)),
        temperature=value("temperature"),
        top_k=value("top_k"),
        top_p=value("top_p"),
        min_p=value("min_p"),
        seed=min(value("seed") + index, 2**64 - 1),
        presence_penalty=value("presence"),
        frequency_penalty=value("frequency"),
        repetition_penalty=value("repetition"),
        logit_bias={token: float(rng.integers(-8, 9)) for token in biased} or None,
        allowed_token_ids=None if kept is None else some(kept),
        bad_words_token_ids=_banned(value("banned")),
        logprobs=value("logprobs"),
        prompt_logprobs=value("prompt_logprobs"),
        stop_token_ids=stops,
        ignore_eos=value("ignore_eos"),
        reasoning=None if (most := value("reasoning")) is None else Reasoning(end=(11, 12, 11, 13), max_tokens=most),
    )
    pooling: Any = case["pooling"] or "mean" if case["model"] == ENCODER else value("pooling")
    if pooling is not None:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return RequestSpec(
        request_id=f"r{index}",
        prompt=tuple(prompt),
        params=params,
        eos_token_ids=ends,
        cache_salt=str(index % int_of(case, "salts")),
        pooling=None if pooling is None else Pooling(pooling, (5, 88) if pooling == "tokens" else ()),
        adapter=("", *digests)[index % (len(digests) + 1)],
    )


def _tokens_of(case: Case, index: int) -> int:
    """Return how many tokens a request generates, so that a batch shrinks as the case specifies."""
    last = int_of(case, "requests") - 1
    place = index % (last + 1)
    return (
        int_of(case, "max_tokens")
        + {
            "together": 0,
            "last first": last - place,
            "first first": place,
            "first stays": 9 * (place == 0),
            "last stays": 9 * (place == last),
        }[str(case["ends"])]
    )


def _banned(length: int) -> tuple[tuple[int, ...], ...]:
    """Return many sequences of `length` tokens, so that texts would contain some."""
    if length == 0:
        return ()
    if length == 1:
        return tuple((token,) for token in range(20, VOCABULARY, 2))
    return tuple((*(one,) * (length - 1), (7 * one + step) % 90) for one in range(90) for step in range(40))


@functools.lru_cache(64)
def _adapter(model: Path, rank: int, index: int) -> tuple[Path, str]:
    """Return the folder of an adapter for the model, written at the first call, and its digest."""
    folder = model.parent / f"{model.name}-lora-{rank}-{index}"
    # The same change of activations at any rank, so that rounding has the same effect.
    write_adapter(model, folder, seed=index, rank=rank, config={"lora_alpha": round(4 * rank**0.5)})
    with open_checkpoint(model) as checkpoint:
        return folder, read_adapter(folder, spec_of(checkpoint).adaptable(), rank).digest


def _adapters(target: Target, case: Case) -> dict[str, Path]:
    """Return the folders of the adapters of a case, by digest, and of one more; ranks differ."""
    model = target.checkpoint(checkpoint_of(case))
    if model is None or not case["adapters"]:
        return {}
    count, rank = int_of(case, "adapters") + 1, int_of(case, "adapter_rank")
    found = (_adapter(model, max(1, rank - index % 3), index) for index in range(count))
    return {digest: folder for folder, digest in found}


def supported_by(target: Target) -> Callable[[Axis, Value], bool]:
    """Return the argument of `KitCase.with_only` for a target."""

    def supported(axis: Axis, value: Value) -> bool:
        needs = {axis.needs, *(abilities_of(str(value)) if axis.name == "model" else ())}
        if needs & target.limits.keys():
            return False
        if axis.name in ("kv_dtype", "attention"):
            return value in (target.ops.kv_dtypes if axis.name == "kv_dtype" else target.implementations)
        if axis.name == "weights":
            return target.quantization == "auto" and value in target.ops.weight_formats
        return target.exact or not ("moe" in needs or axis.name in EXACT_ONLY)

    return supported


def check_steps(target: Target, case: Case) -> None:
    """Run the requests of a case, then fill the engine, and compare all with the oracle. Raises `AssertionError`."""
    neighbour = None
    if case["company"] != "none":
        alike = case["neighbour"] == "alike"
        neighbour = _scenario(*((target, case) if alike else unlike(target, case)), first=int_of(case, "requests"))
    replace(_scenario(target, case), neighbour=neighbour).check()


def unlike(target: Target, case: Case) -> tuple[Target, Case]:
    """Return the backend with another dtype, if it has one, and the case with another value of each setting."""
    dtypes = sorted({"float32", "bfloat16"} - {target.ops.dtype, *target.limits})
    other = target.changed(dtype=dtypes[0]) if dtypes else target
    supported = supported_by(other)
    for axis in AXES:
        changed = {**case, axis.name: next(value for value in axis.values if value != case[axis.name])}
        is_setting = any(field.startswith("EngineConfig.") for field in axis.fields)
        if is_setting and supported(axis, changed[axis.name]) and axis.name != "neighbour":
            fits = allowed(changed) and not target.cls.envelope.exceeded(sizes_of(changed))
            case = changed if fits else case
    return other, {axis.name: case[axis.name] if supported(axis, case[axis.name]) else axis.values[0] for axis in AXES}


def _scenario(target: Target, case: Case, first: int = 0) -> Scenario:
    """Return the engine of a case with requests numbered from `first`."""
    kept = {"kv_cache_dtype": str(case["kv_dtype"])} if case["kv_dtype"] != "auto" else {}
    kept |= {"quantization": str(case["weights"])} if case["weights"] != "auto" else {}
    if case["model"] == ENCODER:  # which keeps no KV
        kept |= {"kv_cache_dtype": "auto", "pipeline_parallel_size": "1"}
    target = target.changed(**kept) if kept else target
    adapters = _adapters(target, case)
    *digests, spare = adapters or [""]
    specs = requests_of(case, tuple(digests), first)
    settings = settings_of(case, max(len(spec.prompt) + spec.params.max_tokens for spec in specs))
    if adapters:
        settings |= {
            "lora_modules": (f"{digests[0]}={adapters[digests[0]]}",),
            "max_loras": len(digests),
            "max_lora_rank": case["adapter_rank"],
        }
    reloaded = (digests[0], spare) if case["reloaded"] else None
    full = requests_that_fill(settings, (*digests[1:], spare) if reloaded else tuple(digests))
    if case["model"] == ENCODER:
        full = [msgspec.structs.replace(spec, pooling=Pooling("mean"), params=specs[0].params) for spec in full]
    return Scenario(
        target=target,
        judge=_judge(target, case, [*specs, *full], adapters, settings),
        settings=settings,
        adapters=[(digest, adapters[digest]) for digest in digests[1:]] if adapters else [],
        drafts=int_of(case, "drafts"),
        wrong_drafts=float(case["wrong_drafts"] or 0),
        drafter=case["drafter"] == "model" and bool(case["drafts"]),
        agrees=target.exact and all(case[axis.name] == axis.values[0] for axis in _CHANGE_TEXTS),
        stored="" if case["stored"] == "F32" else f"@{case['stored']}",
        specs=specs,
        full=full,
        events=Events(
            arrivals=int_of(case, "arrivals"),
            delivered=int_of(case, "delivered"),
            abort=None if case["abort"] is None else int_of(case, "abort"),
            poison=VOCABULARY - 1 if case["poisoned"] else None,
            copies=bool(case["copies"]),
            orders=_orders(target, case),
            updated=case["ordered"] == "update" and target.cls.updates_weights,
            again=bool(case["again"]),
            in_thread=case["company"] == "in a thread",
            built_last=case["neighbour"] == "unlike first",
            first_number=int_of(case, "first_number"),
            eager=case["memory"] != "ample",
            forgets_prefixes=case["memory"] == "restored",
            reloaded=None if reloaded is None else (*reloaded, adapters[spare]),
        ),
    )


def _orders(target: Target, case: Case) -> tuple[ControlOrder, ...]:
    """Return orders after which all texts are the same; a backend that cannot replace its weights pauses only."""
    if case["ordered"] in (None, "update"):
        return ()
    if case["ordered"] == "pause" or not target.cls.updates_weights:
        return PauseGeneration(), ResumeGeneration()
    return Sleep(1 if case["ordered"] == "nap" else 2), WakeUp()


def requests_that_fill(settings: Mapping[str, Any], digests: tuple[str, ...]) -> list[RequestSpec]:
    """Return requests of one token for every slot, then others that together need every block of the pool."""
    slots, context, size = settings["max_num_seqs"], settings["max_model_len"], settings["block_size"]
    left, lengths = settings["num_kv_blocks"] * size, [2] * slots
    while left >= 4 and context <= _MOST_FILLED:
        lengths.append(min(context, left))
        left -= -(-lengths[-1] // size) * size
    rng = np.random.default_rng(len(lengths))
    return [
        RequestSpec(
            request_id=f"full{index}",
            prompt=tuple(rng.integers(0, VOCABULARY - 1, max(1, length - 2)).tolist()),
            params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            adapter=("", *digests)[index % (len(digests) + 1)],
        )
        for index, length in enumerate(lengths)
    ]


def checkpoint_of(case: Case) -> str:
    """Return the name of the checkpoint of a case."""
    return f"{STEP_CASE}:{case['model']}"


def _judge(
    target: Target, case: Case, specs: list[RequestSpec], adapters: dict[str, Path], settings: Mapping[str, Any]
) -> Judge:
    """Return the judge of some requests; their texts are the same for all other settings."""
    plain: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "num_kv_blocks": _GROUPS.get(str(case["model"]), 1) * 16 * -(-settings["max_model_len"] // 32),
        "block_size": 32,
        "enable_prefix_caching": False,
        "structured_output": True,
        "max_model_len": settings["max_model_len"],
    }
    if adapters:
        plain["lora_modules"] = tuple(f"{digest}={folder}" for digest, folder in adapters.items())
        plain |= {"max_loras": len(adapters), "max_lora_rank": settings["max_lora_rank"]}
    checkpoint = checkpoint_of(case)
    name = msgspec.json.encode([checkpoint, specs, plain]).hex()
    return Judge.of(target, name, checkpoint, specs, adapters=adapters, slack=_SLACK, **plain)


_GROUPS_OF_AXES: Final = (
    ("adapters", "adapter_rank", "weights"),
    ("ordered", "memory", "drafts", "kv_dtype", "prefix_caching"),
    ("logprobs", "drafts", "presence", "frequency", "repetition"),
)
"""Axes of a projection, of KV that outlives a step, and of the scores of a token."""
STEPS: Final[Part[Target]] = Part("step", AXES, check_steps, allowed, EDGES, sizes_of, groups=_GROUPS_OF_AXES)
