"""`fdcore doctor` names what a pack lacks, computes wrongly or leaves to the host; a crash is one finding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from rich.console import Console

from fd_core.cli.plugins.conformance import _print as print_report
from fd_core.ops.contract import KVCache, Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes import latent, layers, parts, pools, products, recurrent, routing, sampling
from fd_core.testing.report.doctor.checks import CHECKS, PART_CHECKS, SIZES
from fd_core.testing.report.doctor.examine import copy_bandwidth, examine, examine_cases
from fd_core.testing.report.doctor.runs import DoctorReport, OpFinding
from tests.ops.packs import PACKS
from tests.plugin_sites import GOOD, Site

ROOT = Path(__file__).parents[2]
SMALL = SIZES[0]
T = TypeVar("T")


def findings(ops: Ops, primitive: str, limits: dict[str, str] | None = None, read_output=str) -> dict[str, OpFinding]:
    """Return the findings of one operation at the smallest size, by case."""
    chosen = [check for check in CHECKS if check.primitive == primitive]
    return {check.case: examine(ops, check, SMALL, limits or {}, None, read_output) for check in chosen}


def test_oracle_has_no_findings():
    for check in CHECKS:
        found = examine(NumpyOps(), check, SMALL, {}, None)
        assert (found.outcome, found.fell_back) == ("ok", ""), found


def test_every_operation_of_the_contract_is_examined():
    examined = {name for check in (*CHECKS, *PART_CHECKS) for name in check.primitive.split(", ")}
    needed_by_others = {"prepare_vector", "prepare_embedding", "prepare_linear", "prepare_experts"}
    needed_by_others |= {"prepare_lora", "place_loras", "prepare_heads", "absorb", "expand", "latent_inputs"}
    needed_by_others |= {"stream_linear"}  # draft heads, which engines load with a model
    no_operations = {"configure", "fetch", "add_shared", "padded", "compile", "compile_states"}
    no_operations |= {"replaceable_weights", "compile_adapted", "join", "all_reduce", "all_gather"}
    no_operations |= {"cut", "states_from_host", "upload", "fetch_later", "warm_up_steps", "warmed_up"}
    no_operations |= {"compilation_stats", "joint_norm", "shared", "weigh", "expert"}
    no_operations |= {"layer_norm", "normalize", "add_positions"}  # of encoders, which the kit examines
    methods = {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")}
    assert methods - needed_by_others - no_operations <= examined
    assert {"export_blocks", "import_blocks"} <= examined
    assert all(hasattr(Ops, name) or hasattr(KVCache, name) for name in examined)


class WithoutInt32(NumpyOps):
    def add_at(self, x, rows, ids, values):
        if x.dtype != np.float32:
            raise NotImplementedError("no kernel for int32\nat 0x1f")
        return super().add_at(x, rows, ids, values)


def test_kernel_missing_for_one_dtype_is_reported_with_the_dtype():
    found = findings(WithoutInt32(), "add_at")
    assert found["float32"].outcome == "ok"
    assert found["int32"].outcome == "missing"
    assert found["int32"].reason == "NotImplementedError: no kernel for int32 at 0x1f"


class WrongInOne(NumpyOps):
    def rms_norm(self, x, norm):
        return super().rms_norm(x, norm) * np.float32(1.001)

    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        return np.where(rows.temperature == 1.0, tokens ^ 1, tokens), peaks

    def verify(self, sampled, drafts, num_drafts):
        return super().verify(sampled, drafts, num_drafts)[:, None]


def test_deviation_from_the_oracle_is_reported_with_its_size():
    assert "off by" in findings(WrongInOne(), "rms_norm")[""].reason
    sampled = findings(WrongInOne(), "sample")
    assert {case: found.outcome for case, found in sampled.items()} == {
        "greedy": "ok",
        "drawn": "wrong",
        "filters": "wrong",
    }
    assert findings(WrongInOne(), "verify")[""].reason == "expected shape (5,), got (5, 1)"
    assert findings(WrongInOne(), "add")[""].outcome == "ok"


class RanksLargeVocabulariesWrong(NumpyOps):
    def ranks(self, logits, tokens):
        return super().ranks(logits, tokens) + (logits.shape[1] > 60_000)


def test_operation_is_examined_in_cases_of_the_kit(monkeypatch):
    monkeypatch.setattr(parts, "_REDUCED", set())
    [check] = [check for check in PART_CHECKS if check.primitive == "logprobs"]
    with monkeypatch.context() as patched:
        patched.setattr("fd_core.testing.report.doctor.examine._SECONDS_OF_A_PART", 60.0)  # also on a busy machine
        found = examine_cases(RanksLargeVocabulariesWrong(), check, {}, "mychip")
    assert (found.primitive, found.case, found.outcome) == ("logprobs", "cases", "wrong")
    assert "repeat: fdcore conformance mychip --case logprobs:vocabulary=" in found.reason
    assert examine_cases(NumpyOps(), check, {}, "mychip").outcome == "ok"


def test_every_operation_of_the_kit_has_cases_in_the_doctor():
    modules = (latent, layers, pools, products, recurrent, routing, sampling)
    found = {part.name for module in modules for part in vars(module).values() if isinstance(part, parts.Part)}
    # These need large memory, or are the operations of other parts.
    assert found - {"pool", "table", "elements", "many_experts"} == {check.part.name for check in PART_CHECKS}


class OnDevice(np.ndarray):
    device = "chip:0"


class PartlyOnTheHost(NumpyOps):
    on_host = False

    def from_host(self, array):
        return array.view(OnDevice)

    def to_host(self, array):
        return np.asarray(array)

    def embedding(self, table, token_ids, scale=1.0):
        return super().embedding(table, token_ids, scale).view(OnDevice)

    def add(self, x, y):
        return np.asarray(super().add(x, y))

    def rms_norm(self, x, norm):
        warnings.warn("rms_norm is not implemented for chip, falling back to the processor", stacklevel=1)
        return super().rms_norm(x, norm).view(OnDevice)

    def linear(self, x, weight):
        return super().linear(x, weight).view(OnDevice)


def test_host_fallback_is_detected_by_array_location_or_warning():
    ops = PartlyOnTheHost()
    assert findings(ops, "embedding")[""].fell_back == ""
    assert "expected a result on chip:0, got" in findings(ops, "add")[""].fell_back
    assert "falling back" in findings(ops, "rms_norm")[""].fell_back
    lines = iter(["noise of the start", "W0101 missing XPU kernel: matmul, fallback to CPU one!\n"])
    assert "matmul" in findings(ops, "linear", read_output=lambda: next(lines, ""))[""].fell_back
    assert all(found.outcome == "ok" for found in findings(ops, "add").values())


def test_declared_limit_is_not_a_fault():
    found = findings(NumpyOps(), "moe", {"moe": "the chip has no experts"})[""]
    assert (found.outcome, found.reason) == ("limit", "moe: the chip has no experts")
    assert findings(NumpyOps(), "add", {"primitives": "graphs only"})[""].outcome == "limit"


class CoarseKV(NumpyOps):
    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k, v, kv_slots)
        if layer.dtype == np.int8:
            layer[..., :-4] &= -16


class WideKV(NumpyOps):
    kv_dtypes = ()


def test_8_bit_kv_is_examined_if_the_pack_supports_it():
    kept = findings(CoarseKV(), "write_kv")
    assert (kept[""].outcome, kept["int8"].outcome) == ("ok", "wrong")
    lacking = findings(WideKV(), "paged_attention")
    assert (lacking[""].outcome, lacking["int8"].outcome) == ("ok", "limit")
    assert lacking["int8"].reason == "no KV in int8"


def test_largest_size_is_timed_with_its_memory_traffic():
    ops = NumpyOps()
    bandwidth = copy_bandwidth(ops)
    assert bandwidth is not None
    check = next(check for check in CHECKS if check.primitive == "gather_rows")
    found = examine(ops, check, SIZES[-1], {}, bandwidth)
    assert found.floor_seconds == pytest.approx(2 * 64 * 70_001 * 4 / bandwidth)
    assert found.ratio == pytest.approx(found.seconds / found.floor_seconds)
    assert OpFinding(primitive="x", dtype="float32", size="large", outcome="ok", seconds=0.5, ratio=11).slow
    assert not OpFinding(primitive="x", dtype="float32", size="large", outcome="ok", seconds=1e-6, ratio=11).slow


PARTS = """
import os, signal, time
from fd_core.backends.contract import Availability, Backend
from fd_core.ops.numpy.ops import NumpyOps

class Ops(NumpyOps):
    def rms_norm(self, x, norm):
        raise NotImplementedError("no rms_norm yet")

    def add(self, x, y):
        return x + y + 1

    def verify(self, sampled, drafts, num_drafts):
        os.kill(os.getpid(), signal.SIGSEGV)

    def write_rows(self, x, rows, values):
        time.sleep(600)

class Chip(Backend):
    name = "chip"

    @classmethod
    def probe(cls):
        return Availability(True, "it is here")

    def make_ops(self):
        if self.config.dtype == "bfloat16":
            raise OSError("libchip.so: cannot open")
        return Ops()

    def free_memory(self):
        return 2**30
"""


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_composed_operations_are_named_with_their_calls(framework):
    ops = PACKS[framework]()
    found = {}
    for name in ("rms_norm", "linear", "gather_rows"):
        check = next(check for check in CHECKS if check.primitive == name)
        found[name] = examine(ops, check, SIZES[-1], {}, None)
        assert examine(ops, check, SMALL, {}, None).calls is None
    assert found["rms_norm"].composed
    assert {"mean", "rsqrt"} <= set(found["rms_norm"].calls)
    assert not found["linear"].composed
    assert found["gather_rows"].calls == ("index_select",)


def test_composed_operations_are_listed_the_most_calls_first(capsys):
    def finding(primitive: str, count: int, case: str = "") -> OpFinding:
        calls = ("matmul",) * count
        return OpFinding(primitive=primitive, case=case, dtype="float32", size="large", outcome="ok", calls=calls)

    findings = [finding("add", 1), finding("moe", 5), finding("sample", 9, "drawn"), finding("linear", 3)]
    report = DoctorReport(fd_core="1", machine="m", backend="chip", packs=[], findings=findings)
    print_report(report, Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    assert "composed of several framework calls, and therefore slow on a device: sample drawn (9), moe (5)" in lines
    print_report(msgspec.structs.replace(report, findings=findings[:1]), Console(width=200))
    assert "composed" not in capsys.readouterr().out


def doctor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a plugin whose backend lacks operations."""
    command, environment = visit(folder, *arguments)
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def visit(folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and its environment, with a plugin whose backend lacks operations."""
    Site(folder).install("fd-chip", GOOD.format(name="chip", module="fd_chip"), parts=PARTS)
    (folder / "temporary").mkdir()
    environment = os.environ | {
        "TMPDIR": str(folder / "temporary"),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "COLUMNS": "200",
        "FD_DOCTOR_PATIENCE": "6",
    }
    return [sys.executable, "-m", "fd_core.cli", "doctor", *arguments], environment


ONLY = [word for name in ("rms_norm", "add", "gather_rows", "verify", "write_rows") for word in ("--only", name)]


@pytest.mark.slow
def test_command_reports_faulty_operations_despite_crashes(tmp_path):
    run = doctor(tmp_path, "chip", *ONLY, "--json", "found.json")
    assert run.returncode == 4, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert "chip: missing or wrong: rms_norm, add, write_rows, verify, make_ops" in run.stdout
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    outcomes = {(each["primitive"], each["dtype"], each["size"]): each["outcome"] for each in found}
    assert [outcomes[name, "float32", "small"] for name in ("rms_norm", "add", "gather_rows", "verify")] == [
        "missing",
        "wrong",
        "ok",
        "crash",
    ]
    assert [outcomes["write_rows", "float32", size.name] for size in SIZES] == ["hang"] * len(SIZES)
    assert outcomes["make_ops", "bfloat16", ""] == "missing"
    assert "signal 11" in run.stdout
    assert "libchip.so: cannot open" in run.stdout
    assert not [*(tmp_path / "temporary").glob("fdcore-*")]  # of processes that crashed or were killed


def test_terminated_doctor_leaks_no_process_and_no_folder(tmp_path):
    command, environment = visit(tmp_path, "chip:dtype=float32", "--only", "write_rows")
    environment["FD_DOCTOR_PATIENCE"] = "60"
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        child = until(lambda: children(process.pid))[0]
        until(lambda: [*tmp_path.glob("temporary/fdcore-doctor-*/float32/0")][:1])
    finally:
        process.terminate()
        process.wait()
    until(lambda: not running(child))
    assert not [*(tmp_path / "temporary").glob("fdcore-*")]


def until(found: Callable[[], T], seconds: float = 60.0) -> T:
    """Return the result once it is true; fail after that many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
    return value


def children(pid: int) -> list[int]:
    """Return the children of a process, on Linux."""
    return [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]


def running(pid: int) -> bool:
    """Return True if a process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_healthy_backend_exits_with_0(tmp_path):
    run = doctor(tmp_path, "chip:dtype=float32", "--only", "gather_rows", "--only", "from_host, to_host")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all operations are present and correct" in run.stdout
    assert "from_host, to_host" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nochip"], 4, "unknown backend 'nochip'"),
        (["chip:color=red"], 2, "'color=red' is not a setting"),
        (["chip", "--only", "warp"], 2, "--only: 'warp' is not one of from_host"),
        (["chip", "--json", "/nowhere/found.json"], 2, "cannot write /nowhere/found.json"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(tmp_path, arguments, code, words):
    run = doctor(tmp_path, *arguments)
    assert (run.returncode, run.stdout.strip()) == (code, "")
    assert words in run.stderr
    assert len(run.stderr.splitlines()) == 1
