"""Allowed imports between the parts of fd_core. A change of a rule here is a change of the design."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "fd_core"

BASE = {"config", "deprecations", "errors", "types"}
ALLOWED: dict[str, set[str]] = {
    "__init__": {"engine", "errors", "types"},  # loaded on first use
    "__main__": {"cli"},
    "deprecations": set(),
    "errors": set(),
    "types": {"errors"},
    "config": {"deprecations", "errors", "types"},
    "http": BASE,
    "signals": {"types"},
    "hookspecs": set(),
    "plugins": {"backends", "cluster/scaling", "disagg", "errors", "hookspecs", "kv", "launching", "models"}
    | {"router", "runner", "scheduling", "text"},
    "effects": BASE | {"ops"},
    "kv": BASE | {"effects", "hookspecs", "ops"},  # the tiers copy from and to `ops.contract.KVCache`
    "disagg": BASE | {"effects", "kv", "ops"},
    "scheduling": BASE | {"effects", "kv", "hookspecs", "signals"},
    "router": BASE | {"kv"},
    "router/gateway": BASE | {"disagg", "http", "router", "server", "text"},
    "launching": BASE | {"hookspecs"},
    "cluster": BASE | {"cluster/scaling", "http", "launching", "router", "router/gateway"},
    "cluster/scaling": BASE | {"router"},  # the interface of scaling policies, which the hooks use
    "ops": BASE,
    "models": BASE | {"hookspecs", "ops", "plugins"},  # families are plugins, looked up by the names in files
    "text": BASE | {"hookspecs", "models"},
    "backends": BASE | {"hookspecs", "models", "ops"},
    "runner": BASE | {"backends", "hookspecs", "ops", "signals", "structured"},
    "structured": BASE | {"effects", "launching", "text"},
    # Every pure part and the whole engine: the simulation runs the served code.
    "simulation": BASE
    | {
        "disagg",
        "effects",
        "engine",
        "kv",
        "ops",
        "plugins",
        "router",
        "runner",
        "scheduling",
        "signals",
    }
    | {"http", "engine/tracing"},
    "engine/tracing": BASE | {"effects", "scheduling", "signals"},
    "engine": BASE
    | {"backends", "disagg", "effects", "kv", "launching", "models", "ops", "plugins", "router"}
    # `ops.parallel`: the ranks of one model share memory
    | {"runner", "scheduling", "structured", "text", "engine/tracing"},
    "server": BASE | {"disagg", "engine", "http", "models", "structured", "text"},  # `models.families.image_processor`
    "cli": BASE
    | {
        "cluster",
        "disagg",
        "engine",
        "hookspecs",
        "launching",
        "models",
        "ops",
        "http",
        "plugins",
        "router",
        "router/gateway",
    }
    | {"server", "simulation"}
    | {"testing", "text", "engine/tracing"},
    "testing": BASE
    | {"backends", "cluster/scaling", "disagg", "effects", "engine", "http", "kv", "launching", "models", "ops"}
    | {"plugins", "router", "runner", "scheduling", "signals", "text"},
}
"""Part of fd_core to the other parts that it may import, anywhere in its files."""

PURE = (
    "scheduling",
    "kv/blocks.py",
    "effects/operations.py",
    "types",
    "kv/prefix.py",
    "kv/tiers/host.py",
    "kv/tiers/rates.py",
    "kv/breaker.py",
    "config/constraints.py",
    "config/sizes.py",
    "signals.py",
    *(f"disagg/{name}.py" for name in ("kv_compatibility", "lease", "messages", "ticket")),
    "text/parsing",
    "cluster/controller.py",
    "cluster/scaling.py",
    "disagg/decode/lease.py",
    "disagg/prefill/lease.py",
    *(f"router/{path.name}" for path in sorted((ROOT / "router").glob("*.py"))),  # all but the gateway
)
IMPURE_MODULES = {
    *(
        "asyncio",
        "concurrent",
        "ctypes",
        "datetime",
        "http",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
    ),
    *("queue", "random", "secrets", "select", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile"),
    *("threading", "time", "urllib.request", "uuid", "zmq", "aiohttp", "fastapi", "uvicorn"),
}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}

FRAMEWORKS = {"jax", "onnx", "onnxruntime", "paddle", "tensorflow", "torch", "torchvision", "transformers"}
MAY_USE = {
    "torch": (
        *("models/fallback/", "ops/torch/", "backends/cpu.py", "runner/postprocess/torch_"),
        *("testing/models/families/reference.py", "engine/building/head_training.py", "testing/kit/growth.py"),
    ),
    "transformers": ("models/fallback/", "testing/models/families/"),
    "paddle": ("ops/paddle/framework.py",),
    "onnx": ("ops/onnx_graph/",),
    "onnxruntime": ("ops/onnx_graph/",),
}
SERIALIZERS = {"dill", "joblib", "marshal", "pickle", "shelve", "cloudpickle"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax of a source."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a source's syntax."""
    return tuple(ast.walk(parsed(path)))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Keep syntax trees for the tests of this file alone: every collection of garbage visits their million objects."""
    yield
    parsed.cache_clear()
    nodes.cache_clear()


def sources(*places: str) -> Iterator[Path]:
    for place in places:
        path = ROOT / place
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


@functools.cache
def imported(path: Path, *, types: bool = True) -> tuple[tuple[str, int], ...]:
    """Return every module that a file imports, at any depth, with the line; without `types`, those for types alone."""
    blocks = [node for node in nodes(path) if isinstance(node, ast.If)]
    unloaded = {each for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for each in ast.walk(block)}
    found: list[tuple[str, int]] = []
    for node in nodes(path):
        if not types and node in unloaded:
            continue
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return tuple(found)


def part_of(path: Path) -> str:
    return part_named([part.removesuffix(".py") for part in path.relative_to(ROOT).parts])


def part_named(names: list[str]) -> str:
    """Return the part that a module belongs to: a folder with a separate rule, or the first of its names."""
    inner = "/".join(names[:2])
    return inner if inner in ALLOWED else names[0]


def breaches(*places: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(*places)
        for name, line in imported(path)
        if any(f"{name}.".startswith(f"{module}.") for module in forbidden)
    ]


def test_every_part_has_a_rule() -> None:
    parts = {part_of(path) for path in sources(".")}
    assert parts <= set(ALLOWED)


@functools.cache
def edges(*, types: bool = True) -> dict[str, dict[str, list[str]]]:
    """Return where each part imports each other part; the package itself, which every import loads, is none."""
    found: dict[str, dict[str, list[str]]] = {part: {} for part in ALLOWED}
    for path in sources("."):
        part = part_of(path)
        for name, line in imported(path, types=types):
            package, _, rest = name.partition(".")
            other = part_named(rest.split("."))
            exists = (ROOT / other).exists() or (ROOT / f"{other}.py").exists()
            if package == "fd_core" and other not in ("", part) and exists:
                found[part].setdefault(other, []).append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


@pytest.mark.parametrize("part", ALLOWED)
def test_part_imports_only_lower_parts(part: str) -> None:
    assert [each for other, places in edges()[part].items() if other not in ALLOWED[part] for each in places] == []


@pytest.mark.parametrize("part", ALLOWED)
def test_allowed_imports_are_used(part: str) -> None:
    assert ALLOWED[part] - BASE - edges()[part].keys() == set()


def test_parts_have_no_import_cycles() -> None:
    # The types that `plugins` names are those of the parts that look up their plugins there.
    left = {part: set(others) for part, others in edges(types=False).items()}
    while lowest := [part for part, others in left.items() if not others & left.keys()]:
        for part in lowest:
            del left[part]
    assert left == {}


def test_folders_have_few_modules() -> None:
    crowded = {}
    for folder in (ROOT, *(path for path in ROOT.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        entries = [path for path in folder.iterdir() if path.name != "__pycache__"]
        if len(entries) > (29 if folder == ROOT else 14):
            crowded[str(folder.relative_to(ROOT))] = len(entries)
    assert crowded == {}


def test_checkpoint_reading_does_not_import_models() -> None:
    """Models are built from checkpoints; formats import no architecture, not even inside a function."""
    above = "fd_core.models."
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources("models/loading")
        for name, line in imported(path)
        if name.startswith(above) and not name.startswith("fd_core.models.loading")
    ]


def test_pure_core_has_no_clock_no_randomness_and_no_io() -> None:
    assert breaches(*PURE, forbidden=IMPURE_MODULES) == []
    for path in sources(*PURE):
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in IMPURE_CALLS, f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("np", "random"), f"{path}:{node.lineno}"


def test_clients_import_no_other_test() -> None:
    """Each file of tests/clients runs where one client is installed, and other tests import other clients."""
    clients = sorted(Path(__file__).with_name("clients").glob("*.py"))
    names = {path.name: re.findall(r"^from (tests\S*\.test_\w+) import", path.read_text(), re.M) for path in clients}
    assert len(clients) > 5
    assert {name: found for name, found in names.items() if found} == {}


def test_only_the_framework_packs_import_a_framework() -> None:
    for framework in FRAMEWORKS:
        wrong = breaches(".", forbidden={framework})
        assert [line for line in wrong if not line.startswith(MAY_USE.get(framework, ("nowhere",)))] == []


def test_nothing_can_load_a_pickle() -> None:
    assert breaches(".", forbidden=SERIALIZERS) == []


def test_only_signals_uses_negative_ids() -> None:
    """-9 is written nowhere but in its one home."""
    wrong = []
    for path in sources("."):
        for node in nodes(path):
            minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
            if minus and isinstance(node.operand, ast.Constant) and node.operand.value == 9:
                wrong.append(str(path.relative_to(ROOT)))
    assert set(wrong) == {"signals.py"}


def test_only_the_slot_table_writes_its_columns() -> None:
    wrong = []
    for path in sources("scheduling"):
        for node in nodes(path):
            written = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            if written and re.search(r"\bslots\.\w+$", ast.unparse(node.value)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file uses of other objects and modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls"):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.lineno}: {name.name}" for name in node.names if _is_private(name.name))


def _is_private(name: str) -> bool:
    """`_replace` is a public method of named tuples, whose fields have all other names."""
    return name.startswith("_") and not name.endswith("__") and name != "_replace"


@pytest.mark.parametrize("path", sorted((ROOT / "testing").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_kit_that_vendors_run_uses_public_names_only(path: Path) -> None:
    """A vendor's runner, store or connector has the public names, and may have others."""
    assert list(private_names(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("text", ["a._b", "a.b._c()", "a[0]._b", "from a import _b"])
def test_private_names_are_recognised(text: str) -> None:
    assert list(private_names(ast.parse(text)))


@pytest.mark.parametrize("text", ["self._b", "cls._b", "a.__name__", "self._a.b", "a.b", "from a import b"])
def test_public_names_are_not_reported_as_private(text: str) -> None:
    assert not list(private_names(ast.parse(text)))


def packages_in_circles(part: str) -> list[set[str]]:
    """Return the packages of a part that import each other, those in one circle together."""
    imports: dict[str, set[str]] = {}
    for path in sources(part):
        folder = path.parent.relative_to(ROOT).as_posix()
        for name, _ in imported(path):
            file = ROOT.joinpath(*name.split(".")[1:])
            while not file.is_dir() and not file.with_suffix(".py").exists() and file != ROOT.parent:
                file = file.parent
            other = file if file.is_dir() else file.parent
            if name.startswith("fd_core.") and other != path.parent and other.is_relative_to(ROOT / part):
                imports.setdefault(folder, set()).add(other.relative_to(ROOT).as_posix())

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        due = [start]
        while due:
            more = imports.get(due.pop(), set()) - found
            found |= more
            due += more
        return found

    return [{other for other in reached(each) if each in reached(other)} for each in imports if each in reached(each)]


@pytest.mark.parametrize("part", ["cluster", "http", "launching", "models", "router", "simulation", "structured"])
def test_packages_of_a_part_import_each_other_in_one_direction(part: str) -> None:
    assert packages_in_circles(part) == []
