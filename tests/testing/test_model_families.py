"""The installed families pass their kit, and each wrong one fails the test that names its fault."""

import inspect
import os
import re
from contextlib import suppress

import numpy as np
import pytest
import torch

from fd_core.errors import ModelError
from fd_core.models.families.builtin.llama import Llama
from fd_core.models.families.installed import installed_families
from fd_core.plugins import MODEL, installed_plugins
from fd_core.testing.kit.growth import one_torch_thread
from fd_core.testing.models.checkpoints import SIZES
from fd_core.testing.models.families import FamilySuite, FamilyTarget, find_family
from fd_core.testing.models.families.cases import compare_gguf
from fd_core.testing.models.families.reference import write_reference
from tests.testing.wrong.families import WRONG, LlamaInOneExpression

pytest_plugins = ("pytester",)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with one_torch_thread():
        yield


@pytest.mark.slow
@pytest.mark.in_turn(4)  # families do most by shared code
class TestInstalledFamilies(FamilySuite):
    all_ways = os.environ.get("FD_TEST_EXAMPLES") == "all"

    def targets(self, config):
        return [find_family(name) for name in installed_plugins().offered(MODEL)]

    def test_models_are_in_a_folder_that_pytest_removes(self, target, tmp_path_factory):
        assert target.folder.is_relative_to(tmp_path_factory.getbasetemp())

    @pytest.mark.in_turn(1)
    def test_logits_are_those_of_the_reference(self, target, case, backend, way):
        super().test_logits_are_those_of_the_reference(target, case, backend, way)


CONVERTED_AS = {
    "internlm3": ("llama", {}),
    "mistral": ("llama", {"sliding_window": None}),
    "mixtral": ("llama", {"sliding_window": None}),
    "olmo3": ("olmo2", {}),
}
"""Families that the converter of llama.cpp writes under the name of another one, and values that it does not write."""


@pytest.mark.parametrize("name", CONVERTED_AS)
def test_gguf_file_under_the_name_of_another_family_is_the_same_model(name, tmp_path):
    target, (arch, fixed) = find_family(name), CONVERTED_AS[name]
    target.folder = tmp_path
    for given in target.family.cases.values():
        compare_gguf(target, arch, installed_families().gguf[arch][2], {**given, **fixed})


def test_gguf_values_are_changed_as_by_the_converter():
    """The kit believes a family whose values `transformers` cannot read."""
    stored = {arch: each[2].norm_offset for arch, each in installed_families().gguf.items()}
    offsets = {arch: offset for arch, offset in stored.items() if offset}
    assert offsets == dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"), 1.0)


def test_suite_computes_on_one_thread_of_torch(pytester):
    pytester.makepyfile(
        """
        import torch
        from fd_core.testing.models.families import FamilySuite

        class TestFamily(FamilySuite):
            def targets(self, config):
                return []

            def test_threads(self):
                assert torch.get_num_threads() == 1
        """
    )
    with one_torch_thread():
        torch.set_num_threads(2)
        pytester.inline_run("-k", "test_threads").assertoutcome(passed=1)
        assert torch.get_num_threads() == 2


def serve(monkeypatch, family, folder):
    """Serve a family in the place of the installed one, and return it as a target."""
    installed = installed_families()
    for name in family.architectures:
        monkeypatch.setitem(installed.architectures, name, family)
    for arch, stored in family.gguf.items():
        monkeypatch.setitem(installed.gguf, arch, (family.architectures[0], family.model_type, stored))
    return FamilyTarget(type(family).__name__, family, folder=folder)


def calls(name, target):
    """Yield each call of a test of the suite, on numpy."""
    test = getattr(FamilySuite(), name)
    wanted = inspect.signature(test).parameters
    for case in target.family.cases if "case" in wanted else [None]:
        values = {
            "target": target,
            "case": case,
            "backend": "reference",
            "way": "chunked",
            "form": "cpu:dtype=bfloat16",
            "tmp_path": target.folder / "own",
        }
        yield lambda test=test, values=values: test(**{each: values[each] for each in wanted if each in values})


@pytest.mark.in_turn(8, by=lambda cls: WRONG[cls][0])
@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_wrong_family_fails_the_test_that_names_its_fault(cls, monkeypatch, tmp_path):
    target = serve(monkeypatch, cls(), tmp_path)
    name, words = WRONG[cls]
    with pytest.raises((AssertionError, ModelError, pytest.fail.Exception), match=words):
        for call in calls(name, target):
            call()


def test_right_family_in_another_style_passes(monkeypatch, tmp_path):
    target = serve(monkeypatch, LlamaInOneExpression(), tmp_path)
    names = [name for name in vars(FamilySuite) if name.startswith("test_") and "gguf" not in name]
    assert len(names) >= 9
    for name in names:
        for call in calls(name, target):
            with suppress(pytest.skip.Exception):  # it has no images
                call()


def test_family_that_transformers_lacks_has_its_own_reference(monkeypatch, tmp_path):
    class Own(Llama):
        architectures = ("OwnForCausalLM",)
        model_type = "own"
        cases = {"plain": {}}  # noqa: RUF012
        factor = 1.0

        def reference(self, folder):
            import transformers
            from safetensors.torch import load_file

            config = transformers.AutoConfig.for_model("llama", **SIZES)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            model.load_state_dict(load_file(folder / "model.safetensors"))
            return lambda tokens: model(torch.tensor([tokens])).logits[0].detach().numpy() * np.float32(self.factor)

    logits = "test_logits_are_those_of_the_reference"
    for call in calls(logits, serve(monkeypatch, Own(), tmp_path / "0")):
        call()
    for call in calls("test_cases_differ_from_defaults", serve(monkeypatch, Own(), tmp_path / "1")):
        with pytest.raises(pytest.skip.Exception, match="transformers has no code for own"):
            call()
    Own.factor = 1.001
    with pytest.raises(AssertionError, match="are off by"):
        for call in calls(logits, serve(monkeypatch, Own(), tmp_path / "2")):
            call()
    monkeypatch.setattr(Own, "reference", lambda self, folder: None)
    with pytest.raises(pytest.skip.Exception, match="the family has no reference"):
        for call in calls(logits, serve(monkeypatch, Own(), tmp_path / "3")):
            call()


def test_seed_determines_the_weights(tmp_path):
    def written(name, seed):
        write_reference(Llama(), {}, tmp_path / name, seed)
        return (tmp_path / name / "model.safetensors").read_bytes()

    first = written("a", 3)
    assert written("b", 3) == first
    assert written("c", 4) != first


def test_kit_without_transformers_names_the_command_to_install(monkeypatch):
    from fd_core.errors import PluginError
    from fd_core.testing.kit import requirements

    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "transformers" else True)
    with pytest.raises(PluginError, match="needs transformers") as caught:
        find_family("llama")
    assert re.search(r"pip install 'fd-core\[families\]'", str(caught.value.hint))
