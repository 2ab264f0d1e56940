"""The pages work as they are written: a reader does what each of their blocks says, in their order."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fd_core.errors import ModelError
from fd_core.models.catalog import resolve_model
from tests.documents.blocks import DOCUMENTS, ROOT, Block, blocks_of, name_of
from tests.documents.lent_servers import LentServers
from tests.documents.reader import Reader
from tests.models.test_smollm2 import network_is_there

DONE = ("sh", "bash", "console", "python")
"""Languages of blocks that a reader does something with; test_blocks.py reads the others."""
REAL = "docs/serve/kv-cache-dtype.md"
"""The page whose settings need a model that computes: only `nox -s guides` follows it."""
STORES = "docs/serve/kv-stores.md"
"""The page whose blocks a test of its own does, store by store."""
LATER = (
    *("docs/scale/parallelism.md", "plugins/metax/README.md", "plugins/xpu/README.md"),
    "examples/vendor-plugin/README.md",
)
"""Pages that a model without numbers does not have the settings of, or, the last one, whose commands examples/README.md
has as well: only `nox -s guides` follows them."""
LONGER = (
    *("docs/scale/cluster.md", "docs/scale/data-parallel.md", "docs/scale/routers.md", "docs/serve/batches.md"),
    *("docs/serve/evaluation.md", "docs/serve/speculative-decoding.md", "docs/study/study-a-policy.md"),
    *("docs/study/traces.md", "examples/README.md", "plugins/storage_redis/README.md"),
    *("docs/operate/operations.md", "docs/operate/trouble.md"),
)
"""Pages that take seconds each: `nox -s guides` follows them with `null` as well, the default run the others."""
SHORTER: Mapping[str, str] = {
    "-m venv venv": "-m venv --without-pip venv",
    r"(fdcore conformance --scheduler \w+)$": r"\1 --quick -k signals",
    r"requests=200": "requests=20",
    r'LLM\("smollm2"\)': 'LLM("smollm2", backend="null")',
    r"^pytest\b": "pytest tests/test_policy.py",
}
"""What the default run does instead of what takes long; `nox -s guides` does what the page says, and
tests/examples/test_vendor_plugin.py runs all tests of that project."""

NULL: Mapping[str, str] = {"FD_BACKEND": "null"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl"))), reason="bash and curl are not here"),
]


def todo(document: Path) -> list[Block]:
    """Return what there is to do on a page."""
    return [each for each in blocks_of(document) if each.why is None and (each.file or each.language in DONE)]


PAGES = [each for each in DOCUMENTS if any(block.language in DONE for block in todo(each))]


@pytest.fixture(scope="module", autouse=True)
def smollm2() -> None:
    """Skip where the model is not here and cannot be fetched."""
    try:
        resolve_model("smollm2")
    except ModelError as error:
        if network_is_there():
            raise
        pytest.skip(f"no network: {error}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what pages take from the repository."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentServers]:
    """Servers with the model of `null`, for the pages that start them with the same words."""
    servers = LentServers(tmp_path_factory.mktemp("lent"), NULL)
    yield servers
    servers.close()


@pytest.fixture
def null(folder: Path, lent: LentServers) -> Iterator[Reader]:
    """A reader whose model says nothing of sense, at once."""
    yield from reads(Reader(folder, NULL, SHORTER, lent))


@pytest.fixture
def real(folder: Path) -> Iterator[Reader]:
    """A reader who does exactly what stands there."""
    yield from reads(Reader(folder, {}))


def what_is_cached(document: Path, reader: Reader, store: str) -> tuple[list[str], str]:
    """Start a server with the store, ask by the script that tells what was cached, and ask again behind a restart."""
    blocks = todo(document)
    start = next(each for each in blocks if f"--kv-store {store}" in each.text)
    script = next(each for each in blocks if "cached_tokens" in each.text)
    said = [reader.follow(each) for each in (start, script)]
    reader.restart(8000)
    return said, reader.follow(script)


def reads(reader: Reader) -> Iterator[Reader]:
    try:
        yield reader
    finally:
        reader.close()


def follow(reader: Reader, document: Path) -> None:
    if document.parent.parent == ROOT / "examples":
        reader.folder /= document.parent.relative_to(ROOT)  # the page of a project is read in its folder
    for block in todo(document):
        said = reader.follow(block)
        print(f"{block}\n{said}")
        if block.language == "python" and re.search(r"^print\(", block.text, re.MULTILINE):
            assert said.strip(), f"{block} prints nothing"


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(each, marks=pytest.mark.guide if name_of(each) in LONGER else (), id=name_of(each))
        for each in PAGES
        if name_of(each) not in (REAL, *LATER, STORES)
    ],
)
def test_every_command_and_script_of_a_page_works(document: Path, null: Reader) -> None:
    follow(null, document)


@pytest.mark.guide
@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_every_command_and_script_of_a_page_works_with_the_model_that_it_names(document: Path, real: Reader) -> None:
    follow(real, document)


@pytest.mark.parametrize("store", ["disk", pytest.param("redis", marks=pytest.mark.guide)])
def test_a_prompt_comes_back_from_the_store_behind_a_restart(store: str, null: Reader) -> None:
    said, again = what_is_cached(ROOT / STORES, null, store)
    (prompt, nothing), (same, cached) = (list(map(int, each.split())) for each in (said[-1], again))
    assert (same, nothing) == (prompt, 0)
    assert prompt - 64 < cached < prompt


@pytest.mark.guide
@pytest.mark.parametrize("page", ["docs/quick-start.md", STORES])
def test_the_figures_of_a_page_about_the_store_are_those_that_its_script_prints(page: str, real: Reader) -> None:
    said, again = what_is_cached(ROOT / page, real, "disk")
    for figures in (said[-1], again):
        assert f"`{figures.strip()}`" in (ROOT / page).read_text()
    assert said[-1] != again


@pytest.mark.guide
def test_an_answer_fits_the_schema_of_the_quick_start(real: Reader) -> None:
    blocks = todo(ROOT / "docs" / "quick-start.md")
    answer = json.loads(real.follow(next(each for each in blocks if "json_schema" in each.text)))
    assert set(answer) == {"city", "population"}
    assert isinstance(answer["population"], int)
