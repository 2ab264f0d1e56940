"""Default sampling parameters of a model, for fields that a request leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(ge=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10.0)]


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `generation_config.json` that requests have as well; None for fd_core's default."""

    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Longest text of a conversation; it is lowered to what the context holds."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> GenerationDefaults:
        """Return the known fields of a mapping, such as `generation_config.json`; the others have no meaning here.

        Raises `ValueError` with the field and its limit.
        """
        known = {name: values[name] for name in cls.__struct_fields__ if values.get(name) is not None}
        try:
            return msgspec.convert(known, cls)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`")
            raise ValueError(f"{name}={known.get(name)!r}: {text[:1].lower()}{text[1:]}") from None

    def updated(self, other: GenerationDefaults) -> GenerationDefaults:
        """Return these defaults with those that `other` has."""
        return msgspec.structs.replace(self, **other.set_fields())

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that are not None."""
        values: dict[str, Any] = self.set_fields()
        values.pop("max_new_tokens", None)
        return values | {"top_k": max(values.get("top_k", 0), 0)}

    def set_fields(self) -> dict[str, float]:
        """Return the fields that are not None."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


NO_DEFAULTS: Final = GenerationDefaults()
