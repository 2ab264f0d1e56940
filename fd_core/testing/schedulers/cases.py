"""Axes of what a scheduler plans for: limits, policies, requests and incidents; the auditor checks every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import FairShare, Fcfs, Priority, SchedulingPolicy
from fd_core.scheduling.victims import FewestTokens, LatestArrival, VictimPolicy
from fd_core.testing.axes.covering import Axis, Case, default_case, int_of
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.models.texts import POOLINGS
from fd_core.testing.schedulers.driver import Driver, SchedulerTarget, drive
from fd_core.testing.schedulers.scripts import NULL_IDS, whole_texts
from fd_core.testing.schedulers.tiers import PEER, OperationEnd
from fd_core.testing.schedulers.twins import reusing_ids, twins
from fd_core.testing.stores.values import draws
from fd_core.types import Image, Pooling, PrefillJob, Reasoning, RequestSpec, SamplingParams

GROUPS: Final[Mapping[str, LayerGroups]] = {
    "one": ONE_GROUP,
    "window": LayerGroups(0, 1, window=6),
    "mixed": LayerGroups(1, 1, window=9),
    "many": LayerGroups(2, 5, window=17),
    "narrow": LayerGroups(3, 1, window=1),
}
"""Groups of layers."""
AXES: Final = (
    Axis("slots", (4, 1, 2, 3, 16, 33, 65, 300), ("Limits.max_num_seqs",)),
    Axis("budget", (21, 1, 2, 3, 8, 65, 4097), ("Limits.max_num_batched_tokens",)),
    Axis(
        "context",
        (64, 2, 3, 63, 65, 129),
        ("Limits.max_model_len",),
        rare=(
            {"context": 1025, "output": 40, "block_size": 16, "requests": 20, "prompt": "longest"},
            {"context": 70_000, "block_size": 1, "budget": 70_000, "prompt": "longest", "requests": 2},
            {
                "context": 33_000,
                "block_size": 64,
                "budget": 33_000,
                "requests": 20,
                "prompt": "unequal",
                "incident": "abort_first",
            },
        ),
    ),
    Axis(
        "block_size",
        (4, 1, 2, 3, 16, 64, 127, 128),
        ("Limits.block_size", "SchedulerSetup.hasher"),
        rare=({"block_size": 4096},),
    ),
    Axis(
        "spare_blocks",
        (0, 1, 2, 5, 64),
        ("Limits.num_kv_blocks",),
        rare=({"spare_blocks": 1000}, {"spare_blocks": 99_984}),
    ),
    Axis("k", (0, 1, 2, 3, 5, 8, 16), ("Limits.max_drafts", "SchedulerSetup.drafts")),
    Axis("wrong", (0.3, 0.0, 1.0)),
    Axis("depth", (1, 2, 3, 4, 8, 16), ("Limits.pipeline_depth",)),
    Axis("stages", (1, 2, 4), ("Limits.num_stages",)),
    Axis("groups", tuple(GROUPS), ("Limits.groups",), needs="layer_groups"),
    Axis("epoch", (3, 1, 2**15, 2**16, 2**31, 2**32), ("SchedulerSetup.epoch",)),
    Axis("first_step", (0, 2**8 - 3, 2**15 - 3, 2**16 - 3, 2**31 - 3, 2**32 - 3), ("SchedulerSetup.first_step",)),
    Axis(
        "policy",
        ("fcfs", "priority", "fair"),
        ("SchedulerSetup.policy",),
        rare=(
            {"requests": 60, "policy": "fcfs"},
            {"requests": 60, "policy": "priority", "priority": "wide"},
            {"requests": 60, "policy": "fair", "tenants": 5},
        ),
    ),
    Axis("victims", ("cheapest", "youngest"), ("SchedulerSetup.victims",)),
    Axis("caching", (False, True), needs="prefix_caching"),
    Axis("keep", ("none", "preempted", "finished", "all"), ("SchedulerSetup.keep_kv",), needs="storage"),
    Axis(
        "pairs",
        ("none", "elsewhere", "jobs"),
        (
            "SchedulerSetup.paired",
            "RequestSpec.prefill_at",
            "RequestSpec.prefill_job",
            "RequestSpec.traceparent",
            "PrefillJob.tokens",
            "PrefillJob.held_blocks",
            "PrefillJob.lease",
            "PrefillJob.cache_salt",
            "PrefillJob.priority",
            "PrefillJob.tenant",
            "PrefillJob.traceparent",
            "PrefillJob.adapter",
            "PrefillJob.images",
        ),
        needs="pairs",
    ),
    Axis("events", (False, True), ("SchedulerSetup.kv_events",), needs="prefix_caching"),
    Axis("timed", (False, True), ("SchedulerSetup.clock",)),
    Axis("requests", (6, 1, 2, 20)),
    Axis("prompt", ("mixed", "one", "full", "below", "above", "longest", "unequal"), ("RequestSpec.prompt",)),
    Axis("shared", ("none", "prefix", "same")),
    Axis(
        "vocab",
        (NULL_IDS,),
        ("Limits.vocab_size",),
        rare=({"vocab": 152_064, "k": 3}, {"vocab": 152_064, "caching": True, "shared": "prefix"}),
    ),
    Axis(
        "images",
        ("none", "one", "several", "same", "undivided"),
        ("RequestSpec.images", "Limits.max_image_tokens", "Limits.whole_images"),
        rare=(
            {"images": "undivided", "prompt": "above", "block_size": 16, "budget": 1, "slots": 1},
            {"images": "undivided", "prompt": "longest", "budget": 8, "shared": "same", "caching": True},
            {"images": "undivided", "prompt": "above", "block_size": 16, "budget": 8, "spare_blocks": 1},
        ),
    ),
    Axis("output", (40, 1, 2, 5, 2**31 - 1), ("SamplingParams.max_tokens",)),
    Axis("min_tokens", (0, 1, 6), ("SamplingParams.min_tokens",)),
    Axis("delivered", (0, 1, 7), ("RequestSpec.delivered",)),
    Axis(
        "ends",
        ("limit", "eos", "stop", "both", "ignored"),
        ("RequestSpec.eos_token_ids", "SamplingParams.stop_token_ids", "SamplingParams.ignore_eos"),
    ),
    Axis(
        "sampling",
        ("greedy", "seeded", "filtered", "penalized"),
        (
            "SamplingParams.temperature",
            "SamplingParams.top_p",
            "SamplingParams.top_k",
            "SamplingParams.min_p",
            "SamplingParams.seed",
            "SamplingParams.presence_penalty",
            "SamplingParams.frequency_penalty",
            "SamplingParams.repetition_penalty",
            "SamplingParams.logit_bias",
            "SamplingParams.allowed_token_ids",
            "SamplingParams.bad_words_token_ids",
        ),
    ),
    Axis(
        "results",
        ("none", "chosen", "top", "prompt", "prompt_top", *POOLINGS),
        (
            "SamplingParams.logprobs",
            "SamplingParams.prompt_logprobs",
            "RequestSpec.pooling",
            "Pooling.kind",
            "Pooling.token_ids",
        ),
    ),
    Axis(
        "grammar",
        ("none", "own", "shared"),
        ("SamplingParams.grammar", "SamplingParams.reasoning", "Reasoning.end", "Reasoning.max_tokens"),
    ),
    Axis(
        "owner",
        ("same", "salts", "long_salts", "adapters", "crossed"),
        ("RequestSpec.cache_salt", "RequestSpec.adapter"),
    ),
    Axis("tenants", (1, 2, 5), ("RequestSpec.tenant",)),
    Axis("priority", ("same", "falling", "wide"), ("RequestSpec.priority",)),
    Axis(
        "ids",
        ("short", "long", "unicode", "reused"),
        ("RequestSpec.request_id", "Scheduler.abort.request_id", "Scheduler.phases.request_id"),
    ),
    Axis(
        "incident",
        (
            "none",
            "abort_waiting",
            "abort_first",
            "abort_loading",
            "abort_running",
            "abort_draining",
            "abort_ending",
            "abort_all",
            "error",
            "stale",
            "repeated",
            "paused",
        ),
        ("Scheduler.commit.output", "Scheduler.change_weights.nonce"),
    ),
    Axis("operations", ("first", "last", "late", "at_once")),
    Axis("outcome", ("well", "in_part", "badly", "in_turn"), ("Scheduler.complete.completion",)),
    Axis("turns", ("regular", "random")),
    Axis("schedulers", ("one", "two")),
)
"""Axes of a scheduler's settings, requests and incidents. No chunk ends within `undivided` images, for which a
budget that is too small for one besides decodes is made just large enough. In `random` turns, requests arrive, steps
are planned and answered, incidents happen and operations end in any order."""
EXCUSED: Final[Mapping[str, str]] = {
    "Limits.whole_prompts": "no token follows such a prompt; see `test_whole_prompts_are_not_divided`",
    "SchedulerSetup.limits": "its fields are axes",
    "RequestSpec.params": "its fields are axes",
}
"""Fields of the contract that no axis varies, with the reason."""
POLICIES: Final[Mapping[str, type[SchedulingPolicy]]] = {"fcfs": Fcfs, "priority": Priority, "fair": FairShare}
VICTIMS: Final[Mapping[str, type[VictimPolicy]]] = {"cheapest": FewestTokens, "youngest": LatestArrival}
KEPT: Final[Mapping[str, OffloadSelection | None]] = {
    "none": None,
    "preempted": OffloadSelection(),
    "finished": OffloadSelection(False, True, True),
    "all": OffloadSelection(True, True, True),
}
PLACEHOLDER: Final = 255
"""Token of images."""
IMAGE_TOKENS: Final = 5
"""Most tokens of an image; twice as many may be encoded in a step."""
_DIGITS: Final = "0123456789abcdef" * 4
_CROSSED: Final = (("", ""), ("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("/abc", ""), ("c", "ab"))
"""Salts and adapters of which several are the same text when joined."""
_MAX_TOKENS: Final = 3000
"""Tokens of all requests of a case."""
_MAX_STEPS: Final = 1000
_LONG, _MANY = 1000, 50
"""Contexts and requests of rare cases."""


def prompt_lengths(case: Case) -> list[int]:
    """Return the length of each request's prompt: relative to a block, and at most the context."""
    size, most = int_of(case, "block_size"), int_of(case, "context") - 1
    kinds: Mapping[str, Callable[[int], int]] = {
        "mixed": lambda index: 1 + 7 * index % (2 * size + 5),
        "one": lambda index: 1,
        "full": lambda index: size * (1 + index % 2),
        "below": lambda index: size * (1 + index % 2) - 1,
        "above": lambda index: size * (1 + index % 2) + 1,
        "longest": lambda index: most,
        "unequal": lambda index: 1 + 7 * index if index % 2 else most - 8,
    }
    length = kinds[str(case["prompt"])]
    return [min(max(length(index), 1), most) for index in range(int_of(case, "requests"))]


def effective(case: Case) -> Case:
    """Return a case with the settings that its other settings require."""
    changed = dict(case)
    if case["stages"] != 1:  # no engine speculates with stages
        changed |= {"k": 0, "depth": max(int_of(case, "depth"), int_of(case, "stages"))}
    if case["images"] == "undivided":  # a step then has room for an image besides decodes
        least = IMAGE_TOKENS + (int_of(case, "slots") - 1) * (1 + int_of(changed, "k"))
        changed["budget"] = max(int_of(case, "budget"), least)
    if case["incident"] == "abort_loading" and case["keep"] == "none":
        changed["pairs"] = "elsewhere"
    changed["caching"] = case["caching"] or case["events"] or case["keep"] != "none" or changed["pairs"] != "none"
    return changed


def allowed(case: Case) -> bool:
    """Return True if a case takes at most about a second."""
    context = int_of(case, "context")
    if context > _LONG or int_of(case, "requests") > _MANY:
        return True
    lengths = prompt_lengths(case)
    outputs = [min(int_of(case, "output"), context - length) for length in lengths]
    tokens, budget = sum(lengths) + sum(outputs), max(1 + int_of(case, "k"), int_of(case, "budget"))
    return tokens <= _MAX_TOKENS and tokens / min(budget, 2) <= _MAX_STEPS


def specs_of(case: Case) -> list[RequestSpec]:
    """Return the requests of a case."""
    context = int_of(case, "context")
    specs = [_spec(case, index, length) for index, length in enumerate(prompt_lengths(case))]
    if case["ends"] != "limit":
        most = [min(spec.params.max_tokens, 40) for spec in specs]
        plain = [_with(spec, max_tokens=count, min_tokens=0) for spec, count in zip(specs, most, strict=True)]
        texts = whole_texts(plain, context, int_of(case, "vocab"))
        specs = [_ending(str(case["ends"]), spec, texts[index], index) for index, spec in enumerate(specs)]
    if case["grammar"] != "none":
        specs[1::2] = [
            _with(
                spec,
                grammar=f"start: /{index if case['grammar'] == 'own' else 'shared'}/",
                reasoning=Reasoning(end=(index,), max_tokens=index),
            )
            for index, spec in enumerate(specs[1::2])
        ]
    if case["delivered"]:
        count = int_of(case, "delivered")
        for index, text in zip(
            range(0, len(specs), 3), whole_texts(specs[::3], context, int_of(case, "vocab")), strict=True
        ):
            if specs[index].pooling is None and specs[index].prefill_job is None:
                specs[index] = msgspec.structs.replace(specs[index], delivered=tuple(text[:-1][:count]))
    return specs


def _with(spec: RequestSpec, **params: Any) -> RequestSpec:
    return msgspec.structs.replace(spec, params=msgspec.structs.replace(spec.params, **params))


def _spec(case: Case, index: int, length: int) -> RequestSpec:
    block_size = int_of(case, "block_size")
    name = {"long": "x" * 300 + str(index), "unicode": f"α/{chr(0x4E00 + index)} \n"}
    rng = np.random.default_rng(0 if case["shared"] == "same" else 1 + index)
    common = length * 3 // 4 if case["shared"] == "prefix" else 0
    prompt = np.concatenate(
        [np.arange(common) % 250, rng.integers(0, int_of(case, "vocab") - 1, length - common)]
    ).tolist()
    salt, adapter = _owner(str(case["owner"]), index)
    priority = {"same": 0, "falling": -index, "wide": (0, 127, 128, -129, 2**15, 2**31, -(2**31))[index % 7]}
    results: Any = case["results"]
    params = _sampling(str(case["sampling"]), index)
    pooling = None
    if results in POOLINGS and index % 2:
        pooling = Pooling(results, (1, 200) if results == "tokens" else ())
    elif results != "none":
        field = "prompt_logprobs" if results.startswith("prompt") else "logprobs"
        params |= {field: (20 + 14 * index) % 21 if results.endswith("top") else 0}
    job = case["pairs"] == "jobs" and index % 3 == 0 and not pooling
    most = 1 if pooling or job else int_of(case, "output")
    spec = RequestSpec(
        request_id=name.get(str(case["ids"]), f"r{index}"),
        prompt=tuple(prompt),
        params=SamplingParams(
            max_tokens=most, ignore_eos=True, min_tokens=min(int_of(case, "min_tokens"), most), **params
        ),
        priority=priority[str(case["priority"])],
        tenant=f"tenant{index % int_of(case, 'tenants')}" if case["tenants"] != 1 else "",
        cache_salt=salt,
        adapter=adapter,
        pooling=pooling,
        prefill_at=PEER if case["pairs"] == "elsewhere" and index % 4 else "",
        traceparent=f"00-{index:032x}-{index + 1:016x}-01" if case["pairs"] == "elsewhere" else "",
    )
    images: tuple[Image, ...] = ()
    if case["images"] != "none" and not (pooling or spec.params.prompt_logprobs is not None):
        images = _images(str(case["images"]), index, length + job)  # those of a job may end with it
        for image in images:
            prompt[image.start : image.end] = [PLACEHOLDER] * image.num_tokens
        spec = msgspec.structs.replace(spec, images=images, prompt=tuple(prompt))
    if job:
        held = min(index // 3 % 2, length // block_size)
        tokens = np.array(prompt, "<i4").tobytes()
        given = PrefillJob(
            tokens, held, salt, spec.priority, spec.tenant, "", lease=f"{index:032x}", adapter=adapter, images=images
        )
        return msgspec.structs.replace(spec, prefill_job=given)
    return spec


def _images(kind: str, index: int, length: int) -> tuple[Image, ...]:
    """Return images within a prompt: one, or several without a gap."""
    count = min(IMAGE_TOKENS, length - 2)
    starts = range(1, length - count, count) if count > 0 else ()
    images = [
        Image(start, count, bytes((0 if kind == "same" else index % 3, start % 256)) * 8, (1, 1), b"rgb")
        for start in starts
    ]
    return tuple(images[: 3 if kind in ("several", "undivided") else 1])


def _owner(kind: str, index: int) -> tuple[str, str]:
    """Return the salt and the adapter of a request."""
    if kind == "crossed":
        return _CROSSED[index % len(_CROSSED)]
    salts = {"salts": ("tenant-1", "tenant-10", "tenant-1 ")[index % 3], "long_salts": "s" * 500 + str(index % 3)}
    return salts.get(kind, ""), _DIGITS[:-1] + str(index % 3) if kind == "adapters" else ""


def _sampling(kind: str, index: int) -> dict[str, Any]:
    """Return sampling parameters, all different from their defaults in the last two kinds together."""
    seed = (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)[index % 6]
    random: dict[str, Any] = {"temperature": 1.0, "seed": seed}
    filtered = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40 + index,
        "min_p": 0.01,
        "allowed_token_ids": tuple(range(index % 3, 200)),
    }
    penalized = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.25,
        "logit_bias": {index: 3.0, 255: -100.0},
        "bad_words_token_ids": ((7, 8), (index,)),
    }
    return {
        "greedy": {"temperature": 0.0},
        "seeded": random,
        "filtered": random | filtered,
        "penalized": random | penalized,
    }[kind]


def _ending(kind: str, spec: RequestSpec, text: Sequence[int], index: int) -> RequestSpec:
    """Return a request with EOS and stop ids: the last of up to 131 ends the text, the others do not occur in it."""
    last = text[(3 * index + 1) % len(text)]
    others = [token for token in range(250, 10, -1) if token not in text]
    first, second = (*others[: (1, 0, 2, 8, 130)[index % 5]], last), tuple(others[: index % 3])
    ids = {"eos": (first, second), "stop": (second, first), "both": (first, first[-1:]), "ignored": (first, second)}
    eos, stop = ids[kind]
    spec = msgspec.structs.replace(spec, eos_token_ids=eos)
    return _with(spec, stop_token_ids=stop, ignore_eos=kind == "ignored")


def driver_of(target: SchedulerTarget, case: Case, specs: Iterable[RequestSpec]) -> Driver:
    """Return a scheduler with the settings of a case, without requests."""
    if case["ids"] == "reused":
        target = replace(target, make=reusing_ids(target.make))
    if case["schedulers"] == "two":
        target = replace(target, make=twins(target.make))
    size, k = int_of(case, "block_size"), int_of(case, "k")
    groups = GROUPS[str(case["groups"])]
    return drive(
        target,
        k=k,
        wrong=float(case["wrong"] or 0.0),
        caching=bool(case["caching"]),
        keep=KEPT[str(case["keep"])],
        paired=case["pairs"] != "none",
        policy=POLICIES[str(case["policy"])](),
        victims=VICTIMS[str(case["victims"])](),
        timed=bool(case["timed"]),
        depth=int_of(case, "depth"),
        known=tuple(specs),
        setup={name: case[name] for name in ("epoch", "first_step")} | {"kv_events": bool(case["events"])},
        max_num_seqs=int_of(case, "slots"),
        max_image_tokens=0 if case["images"] == "none" else 2 * IMAGE_TOKENS,
        whole_images=case["images"] == "undivided",
        max_num_batched_tokens=max(1 + k, int_of(case, "budget")),
        max_model_len=int_of(case, "context"),
        block_size=size,
        num_kv_blocks=groups.blocks(int_of(case, "context"), size) + int_of(case, "spare_blocks"),
        groups=groups,
        num_stages=int_of(case, "stages"),
        vocab_size=int_of(case, "vocab"),
    )


def check_schedule(target: SchedulerTarget, case: Case) -> None:
    """Serve the requests of a case with its incidents; then the idle scheduler must have room as a new one.

    Raises `InvariantViolated`.
    """
    case = effective({**default_case(AXES), **case})
    specs = specs_of(case)
    driver, depth = driver_of(target, case, specs), int_of(case, "depth")
    waiting = specs[: -(-len(specs) // 2)] if case["ids"] == "reused" else list(specs)
    incidents = _incidents(driver, str(case["incident"]), waiting)
    draw = draws(len(specs))

    def submit() -> None:
        count = 1 + len(specs) // 3
        driver.submit(*waiting[:count])
        del waiting[:count]

    moves: tuple[Callable[[], object], ...] = (
        submit,
        lambda: driver.fill(draw.randint(1, depth)),
        lambda: driver.in_flight and driver.answer(),
        lambda: next(incidents),
        lambda: _end_operations(driver, case),
    )
    for number in range(3 * len(specs) + 40):
        if case["turns"] == "random":
            for move in draw.choices(moves, (1, 4, 4, 2, 3), k=6):
                move()
            continue
        if waiting and not number % 2:
            submit()
        driver.fill(depth)
        next(incidents)
        # A pipeline is sometimes drained as a whole.
        for _ in range(depth if number % 7 == 6 else 1):
            if driver.in_flight:
                driver.answer()
        _end_operations(driver, case)
    driver.submit(*waiting)
    driver.run(depth)
    driver.submit(*specs[len(driver.auditor.requests) :])
    driver.run(depth)
    driver.abort(specs[0].request_id, "never added")  # ignored
    driver.check_policy()
    driver.check_capacity(driver_of(target, case, ()))


def _incidents(driver: Driver, kind: str, waiting: list[RequestSpec]) -> Iterator[None]:
    """Cause an incident now and then, to at most every third request."""
    harmed: set[str] = set()
    for turn in count():
        requests = driver.auditor.requests
        state = {
            "abort_waiting": "waits",
            "abort_first": "waits",
            "abort_loading": "loads",
            "abort_running": "runs",
            "abort_draining": "drains",
            "abort_ending": "runs",
        }
        candidates = [
            name
            for name, each in requests.items()
            if each.end is None and not each.abort_requested and each.where == state.get(kind)
            if kind != "abort_ending" or (each.occupancy and each.occupancy.num_planned >= each.limit)
        ]
        first = kind == "abort_first"  # of the queue, after steps were planned meanwhile
        if candidates and 3 * len(harmed) < len(requests) + 2 and (turn % 4 == 3 or not first):
            name = candidates[0 if first else -1]
            harmed.add(name)
            driver.abort(name, name)
        if kind == "abort_all" and len(requests) > 2 and not harmed:
            harmed |= {name for name, each in requests.items() if each.end is None}
            driver.abort(*harmed)
        if kind == "paused" and turn % 5 == 0:
            left = sorted(driver.auditor.unfinished - harmed) if 3 * len(harmed) < len(requests) else []
            aborted = left[turn % 2 - 1 :][:1]
            harmed.update(aborted)
            arriving = [waiting.pop(0)] if waiting else []
            driver.pause(*aborted, arriving=arriving)
        if driver.in_flight and len(driver.plans) % 5 == 4:
            plan = driver.in_flight[0].plan
            running = [slot for slot in plan.slots.tolist() if slot in driver.auditor.occupancies]
            failed = running[:: max(2, len(running) // 2)] if len(running) > 1 else []
            if kind == "error" and failed and 3 * len(harmed) < len(requests):
                harmed |= {driver.auditor.occupancies[slot].request.name for slot in failed}
                driver.answer(*failed)
            elif kind == "stale":
                driver.answer_stale(epoch=plan.epoch + 1)
                driver.answer_stale(epoch=plan.epoch - 1)
                driver.answer_stale(step=plan.step + 1)
            elif kind == "repeated":
                driver.answer_twice()
        yield


def _end_operations(driver: Driver, case: Case) -> None:
    """Complete operations outside steps, in the order and with the outcome of a case."""
    pending, order = driver.tiers.pending, str(case["operations"])
    if not pending or (order == "late" and len(driver.plans) % 9 and driver.in_flight):
        return
    outcome = (*OperationEnd,)[len(driver.plans) % 3]
    if case["outcome"] != "in_turn":
        outcome = OperationEnd[str(case["outcome"]).upper()]
    for _ in range(1 if order in ("first", "last") else len(pending)):
        driver.complete(-1 if order == "last" else 0, outcome)


_SIZED: Final = (
    *("slots", "budget", "context", "block_size", "spare_blocks", "k", "wrong", "depth", "stages", "groups"),
    *("requests", "prompt", "shared", "vocab", "output", "caching", "keep", "incident"),
)
_CROWDED: Final[Mapping[str, tuple[int | str, ...]]] = {
    "slots": (4, 2, 3, 16),
    "budget": (21, 3, 8, 65),
    "context": (64, 65),
    "block_size": (4, 2, 3, 5),
    "spare_blocks": (0, 1, 2),
    "requests": (6, 12),
    "prompt": ("mixed", "full", "below", "above"),
    "output": (40, 2**31 - 1),
}
"""Values with which requests compete for slots and blocks, so that some are preempted, evicted and loaded again."""
EDGES: Final[Mapping[str, Edge]] = {
    "max_num_seqs": Edge("slots"),
    "max_num_batched_tokens": Edge("budget"),
    "max_model_len": Edge("context"),
    "block_size": Edge("block_size"),
    "max_drafts": Edge("k"),
    "pipeline_depth": Edge("depth"),
}
"""Axes that reach the limits of an envelope."""


def sizes_of(case: Case) -> Mapping[str, int]:
    """Return the sizes of a case under the names of an envelope's limits."""
    case = effective({**default_case(AXES), **case})
    sizes = {name: int_of(case, edge.axis) for name, edge in EDGES.items()}
    return {**sizes, "max_num_batched_tokens": max(sizes["max_num_batched_tokens"], 1 + sizes["max_drafts"])}


SIZES: Final[Part[SchedulerTarget]] = Part(
    "size", tuple(axis for axis in AXES if axis.name in _SIZED), check_schedule, allowed, EDGES, sizes_of
)
"""Every limit, down to contexts of two tokens, with requests of every size."""
SCHEDULES: Final[Part[SchedulerTarget]] = Part(
    "schedule",
    tuple(replace(axis, values=_CROWDED[axis.name], rare=()) if axis.name in _CROWDED else axis for axis in AXES),
    check_schedule,
    allowed,
    EDGES,
    sizes_of,
)
"""Every kind of request under every policy, with incidents, where slots and blocks are scarce."""
