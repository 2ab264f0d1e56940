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
from fd_core.testing.report.doctor.checks import CHECKS
from fd_core.testing.report.doctor.examine import copy_bandwidth, examine
from fd_core.testing.report.doctor.runs import DoctorReport, OpFinding
from tests.ops.packs import PACKS
from tests.plugin_sites import GOOD, Site

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """Examine the large cases and one more."""
    monkeypatch.setattr("fd_core.testing.report.doctor.examine._SECONDS_OF_A_PART", 0.0)
    monkeypatch.setattr(parts, "_REDUCED", set())


def findings(ops: Ops, operation: str, limits: dict[str, str] | None = None, **others) -> dict[str, OpFinding]:
    """Return the findings of the checks that have an operation, by operation."""
    chosen = [check for check in CHECKS if operation in check.operations]
    return {
        found.primitive: found for check in chosen for found in examine(ops, check, limits or {}, "mychip", **others)
    }


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.operations[0])
def test_oracle_has_no_findings_and_every_operation_is_timed(check):
    found = examine(NumpyOps(), check, {}, "numpy")
    assert {each.primitive: (each.outcome, each.fell_back) for each in found} == dict.fromkeys(
        check.operations, ("ok", "")
    )
    assert not [each.primitive for each in found if each.seconds is None]


def test_every_operation_of_the_contract_is_examined():
    examined = {name for check in CHECKS for name in check.operations}
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


def test_missing_kernel_is_reported_with_its_error():
    found = findings(WithoutInt32(), "add_at")["add_at"]
    assert (found.outcome, found.reason) == ("missing", "NotImplementedError: no kernel for int32 at 0x1f")


class WithoutPagedAttention(NumpyOps):
    attention = Ops.attention

    def paged_attention(self, q, layer, heads, step):
        raise NotImplementedError("no kernel")


def test_operation_that_a_composition_lacks_is_named():
    assert [*findings(WithoutPagedAttention(), "attention")] == ["paged_attention"]


class WrongInOne(NumpyOps):
    def rms_norm(self, x, norm):
        return super().rms_norm(x, norm) * np.float32(1.001)

    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        return np.where(rows.temperature == 1.0, tokens ^ 1, tokens), peaks

    def verify(self, sampled, drafts, num_drafts):
        return super().verify(sampled, drafts, num_drafts)[:, None]


def test_deviation_from_the_oracle_is_reported_with_its_size():
    found = findings(WrongInOne(), "rms_norm")["rms_norm"]
    assert found.outcome == "wrong"
    assert "off by" in found.reason
    assert findings(WrongInOne(), "sample")["sample"].outcome == "wrong"
    assert findings(WrongInOne(), "verify")["verify"].outcome == "wrong"
    assert findings(WrongInOne(), "add")["add"].outcome == "ok"


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["add_at", "write_rows", "mlp_inputs", "paged_attention", "attention", "gate_up"])
def test_first_operation_with_another_result_is_named(name):
    def wrong(self, *arguments):
        return getattr(NumpyOps, name)(self, *arguments) + 1

    ops = type("Wrong", (NumpyOps,), {name: wrong})()
    assert {each.primitive for each in findings(ops, name).values() if each.bad} == {name}


class RanksLargeVocabulariesWrong(NumpyOps):
    def ranks(self, logits, tokens):
        return super().ranks(logits, tokens) + (logits.shape[1] > 60_000)


def test_failing_case_is_reduced():
    found = findings(RanksLargeVocabulariesWrong(), "ranks")["ranks"]
    assert found.outcome == "wrong"
    assert "repeat: fdcore conformance mychip --case logprobs:vocabulary=" in found.reason


def test_every_operation_of_the_kit_has_cases_in_the_doctor():
    modules = (latent, layers, pools, products, recurrent, routing, sampling)
    found = {part.name for module in modules for part in vars(module).values() if isinstance(part, parts.Part)}
    # These need large memory, or are the operations of other parts.
    assert found - {"pool", "table", "elements", "many_experts"} == {check.part.name for check in CHECKS}


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
    assert findings(ops, "embedding")["embedding"].fell_back == ""
    assert "expected a result on chip:0, got" in findings(ops, "add")["add"].fell_back
    assert "falling back" in findings(ops, "rms_norm")["rms_norm"].fell_back
    words = "W0101 missing XPU kernel: matmul, fallback to CPU one!\n"
    assert "matmul" in findings(ops, "linear", read_output=lambda: words)["linear"].fell_back


def test_declared_limit_is_not_a_fault():
    found = findings(NumpyOps(), "moe", {"moe": "the chip has no experts"})["moe"]
    assert (found.outcome, found.reason) == ("limit", "moe: the chip has no experts")
    assert findings(NumpyOps(), "add", {"primitives": "graphs only"})["add"].outcome == "limit"


class CoarseKV(NumpyOps):
    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k, v, kv_slots)
        if layer.dtype == np.int8:
            layer[..., :-4] &= -16


class CoarseKVThatIsNotOffered(CoarseKV):
    kv_dtypes = ()


def test_8_bit_kv_is_examined_if_the_pack_supports_it(monkeypatch):
    monkeypatch.setattr("fd_core.testing.report.doctor.examine._SECONDS_OF_A_PART", 60.0)
    [found] = findings(CoarseKV(), "write_kv").values()
    assert found.outcome == "wrong"
    assert "kv_dtype=int8" in found.reason
    assert findings(CoarseKVThatIsNotOffered(), "write_kv")["write_kv"].outcome == "ok"


def test_largest_case_is_timed_with_its_memory_traffic():
    ops = NumpyOps()
    bandwidth = copy_bandwidth(ops)
    assert bandwidth is not None
    found = findings(ops, "rms_norm", bandwidth=bandwidth)["rms_norm"]
    assert found.floor_seconds == pytest.approx((2 * 64 * 1024 * 4 + 1024 * 4) / bandwidth)
    assert found.ratio == pytest.approx(found.seconds / found.floor_seconds)
    assert OpFinding(primitive="x", dtype="float32", outcome="ok", seconds=0.5, ratio=11).slow
    assert not OpFinding(primitive="x", dtype="float32", outcome="ok", seconds=1e-6, ratio=11).slow


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
    found = {name: findings(ops, name)[name] for name in ("rms_norm", "linear", "gather_rows")}
    assert found["rms_norm"].composed
    assert {"mean", "rsqrt"} <= set(found["rms_norm"].calls)
    assert not found["linear"].composed
    assert found["gather_rows"].calls == ("index_select",)


def test_composed_operations_are_listed_the_most_calls_first(capsys):
    def finding(primitive: str, count: int) -> OpFinding:
        return OpFinding(primitive=primitive, dtype="float32", outcome="ok", calls=("matmul",) * count)

    findings = [finding("add", 1), finding("moe", 5), finding("sample", 9), finding("linear", 3)]
    report = DoctorReport(fd_core="1", machine="m", backend="chip", packs=[], findings=findings)
    print_report(report, Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    assert "composed of several framework calls, and therefore slow on a device: sample (9), moe (5)" in lines
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
    assert "chip: missing or wrong: rms_norm, verify, write_rows, make_ops" in run.stdout
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    outcomes = {(each["primitive"], each["dtype"]): each["outcome"] for each in found}
    assert outcomes == {
        ("rms_norm", "float32"): "missing",
        ("verify", "float32"): "crash",
        ("write_rows", "float32"): "hang",
        ("make_ops", "bfloat16"): "missing",
    }
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
    run = doctor(tmp_path, "reference", "--only", "verify", "--only", "to_host")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all operations are present and correct" in run.stdout
    assert "to_host" in run.stdout


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
