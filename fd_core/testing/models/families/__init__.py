"""The kit for families of models, which compares small ones with `transformers`: derive from `FamilySuite`."""

from fd_core.testing.models.families.cases import FamilySuite
from fd_core.testing.models.families.target import FamilyTarget, find_family

__all__ = ["FamilySuite", "FamilyTarget", "find_family"]
