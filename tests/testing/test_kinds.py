"""Every kind of plugin has a kit, a template whose test uses the kit, and a guide that a test follows."""

import importlib
import re
from importlib import resources
from pathlib import Path

import pytest

from fd_core.cli.plugins.scaffold import project
from fd_core.plugins import KINDS

ROOT = Path(__file__).parents[2]
TEMPLATES = resources.files(project.__package__).joinpath("templates", "tests")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.word)
def test_kind_has_a_kit_a_template_and_a_followed_guide(kind):
    recipes = {name: recipe for name, recipe in project.RECIPES.items() if recipe.kind is kind}
    assert recipes, f"`fdcore plugins new --kind` has no template for a {kind.word}"
    for name, recipe in recipes.items():
        text = TEMPLATES.joinpath(f"test_{project.test_of(name)}.py.tmpl").read_text()
        kits = re.findall(r"fd_core\.testing[\w.]*", text)
        assert kits or recipe.prove.startswith("fdcore conformance"), f"the test of the template runs no kit:\n{text}"
        for kit in kits:
            importlib.import_module(kit)
        assert (ROOT / "docs" / "extend" / recipe.guide).is_file()
        followed = [path.name for path in (ROOT / "tests" / "testing").glob("test_write_a*.py")
                    if f'"{recipe.guide}"' in path.read_text()]  # fmt: skip
        assert followed, f"no test follows docs/extend/{recipe.guide}"
