"""The family under test with its small models, and the backends that compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from fd_core.backends.contract import Model
from fd_core.errors import FdError, PluginError
from fd_core.models.families.contract import Family
from fd_core.models.families.spec import DecoderSpec, RopeSpec, Traits, decoder_spec
from fd_core.models.loading.config import ModelConfig, text_part
from fd_core.ops.contract import Ops
from fd_core.plugins import BACKEND, MODEL, installed_plugins
from fd_core.testing.kit.requirements import FAMILIES_EXTRA, ReadNames, require_packages
from fd_core.testing.kit.target import Target, parse_target
from fd_core.testing.models.families.reference import Classes, Logits, config_of, write_classifier, write_reference

LONGEST: Final = 64
"""Maximum length of a sequence."""
_Made = TypeVar("_Made")


class FamilyTarget:
    """One family under a name, with the models of its cases, each written once."""

    def __init__(self, name: str, family: Family, seed: int = 0, folder: Path | None = None) -> None:
        self.name = name
        self.family = family
        self.seed = seed
        """Of all random weights."""
        self.folder = folder
        """Folder of its models. The suite sets it to one of those that pytest removes, before the first test."""
        self._written: dict[str, tuple[Path, Logits | None]] = {}

    def __str__(self) -> str:
        return self.name

    def about(self) -> dict[str, Any]:
        """Return the description for its report card."""
        return {"distribution": str(installed_plugins().offered(MODEL)[self.name].origin)}

    def model(self, case: str, **more: Any) -> tuple[Path, Logits | None]:
        """Return the folder of a case's model, with `more` fields of its config, and its reference logits, if any."""
        return self.model_of({**self.family.cases[case], **more})

    def model_of(self, fields: Mapping[str, Any]) -> tuple[Path, Logits | None]:
        """Return the folder of a model with these fields of its config, and its reference logits, if any."""
        key = repr(fields)
        if key not in self._written:
            folder = self._below(str(len(self._written)))
            self._written[key] = folder, write_reference(self.family, fields, folder, self.seed)
        return self._written[key]

    def classifier(self) -> tuple[Path, Classes | None]:
        """Return the folder of a model that classifies texts, and the reference's states and logits, if it has one."""
        folder = self._below("classes")
        return folder, write_classifier(self.family, next(iter(self.family.cases.values())), folder, self.seed)

    def _below(self, name: str) -> Path:
        assert self.folder is not None, f"{self.name} has no folder for its models"
        return self.folder / name

    def filled(self, fields: Mapping[str, Any], without: str = "") -> dict[str, Any]:
        """Return the whole config of a model; `transformers` gives the fields that are left out, such as `without`."""
        return text_part(config_of(self.family, fields, without).to_dict())

    def describe(self, values: Mapping[str, Any]) -> DecoderSpec:
        """Return the description of a config. Raises `ModelError` for one that the family refuses.

        Raises `AssertionError` if it depends on configs that the family described before.
        """
        config = ModelConfig(values).filled(self.family.defaults, self.family.renamed)
        found, first = (
            replace(
                decoder_spec(self.family.architectures[0], config, family.traits(config)), images=family.images(config)
            )
            for family in (self.family, type(self.family)())
        )
        same = found == first  # pytest would list every difference
        assert same, "a description depends on earlier ones"
        return found

    def fields(self, values: Mapping[str, Any]) -> set[str]:
        """Return the fields of a config that the family reads, without those that every decoder reads."""
        renamed = self.family.renamed
        usual = ReadNames({"num_hidden_layers": 1, **values, renamed.get("hidden_act", "hidden_act"): "silu"})
        rope = RopeSpec((1.0,))
        decoder_spec("", ModelConfig(usual, renamed=renamed), Traits(rope=lambda layer: rope))
        return (self.read(values) - usual.read | {"tie_word_embeddings"}) & values.keys()

    def read(self, values: Mapping[str, Any]) -> set[str]:
        """Return all fields of a config that describing it reads."""
        seen = ReadNames(values)
        self.describe(seen)
        return seen.read


def find_family(name: str, seed: int = 0) -> FamilyTarget:
    """Return the family `name`. Raises `PluginError` if it is unknown, or if a package of the kit is missing."""
    require_packages("torch", "transformers", extra=FAMILIES_EXTRA)
    family: Family = installed_plugins().find(MODEL, name).make()
    if not family.cases:
        raise PluginError(f"the model family {name} has no cases", hint="add small models to its `cases`")
    return FamilyTarget(name, family, seed)


def float32_backends() -> list[str]:
    """Return the installed backends that can run here, in float32 and with settings; numpy first."""
    found = ["reference", "cpu:dtype=float32,native_kernels=false", "cpu:dtype=float32"]
    plugins = installed_plugins()
    for name in sorted(plugins.offered(BACKEND).keys() - {"reference", "cpu"}):
        with suppress(FdError):  # another command reports a backend that cannot be imported
            cls = plugins.load(BACKEND, name)
            if cls.needs_checkpoint and cls.probe().available:
                found.append(f"{name}:dtype=float32")
    return found


@cache
def backend_of(text: str) -> Target:
    """Return a backend with settings; its pack is shared by all tests."""
    return parse_target(text, Path())


def load(
    text: str, folder: Path, change: Callable[[Ops], None] | None = None, longest: int = LONGEST
) -> tuple[Model, Ops]:
    """Load a model on a backend, on a pack of its own if `change` makes it a rank or a stage."""
    target = backend_of(text)
    config = target.config(max_model_len=longest)
    ops = target.ops if change is None else target.cls(config).make_ops()
    if change is not None:
        change(ops)
    return target.cls(config).load_model(folder, ops, lambda *_: None), ops
