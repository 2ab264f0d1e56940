"""The families of all installed plugins, by the names that files use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fd_core.errors import ModelError, PluginError
from fd_core.models.families.contract import Family
from fd_core.models.loading.gguf_family import Gguf, KnownGguf
from fd_core.plugins import MODEL, installed_plugins


@dataclass(frozen=True, slots=True)
class InstalledFamilies:
    """Families that are served, and problems of the others."""

    architectures: dict[str, Family]
    """By the name in `config.json`."""
    gguf: KnownGguf
    """Of the same families."""
    problems: tuple[str, ...]
    """Why plugins, and names that two families claim, cannot be used."""

    def unknown(self, message: str) -> ModelError:
        """Return the error for an architecture that no family has; it names the plugins that cannot be used."""
        return ModelError(
            "; ".join([message, *self.problems]), hint=f"supported are {', '.join(sorted(self.architectures))}"
        )


@cache
def installed_families() -> InstalledFamilies:
    """Import every family once; one that fails is a problem, not an error."""
    plugins = installed_plugins()
    problems = [str(each) for each in plugins.problems if each.kind in (None, MODEL)]
    architectures: dict[str, Family] = {}
    gguf: dict[str, tuple[str, str, Gguf]] = {}
    for name, offer in plugins.offered(MODEL).items():
        try:
            family: Family = offer.make()
        except PluginError as error:
            problems.append(error.message)
            continue
        claimed = {*family.architectures} & {*architectures}
        claimed |= {known for known, stored in family.gguf.items() if known in gguf and gguf[known][2] != stored}
        if claimed:
            problems.append(f"model family {name} of plugin {offer.origin}: another family has {', '.join(claimed)}")
            continue
        architectures |= dict.fromkeys(family.architectures, family)
        for known, stored in family.gguf.items():
            gguf[known] = family.architectures[0], family.model_type, stored
    return InstalledFamilies(architectures, gguf, tuple(problems))
