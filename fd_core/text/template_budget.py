"""Budget of one template rendering: steps, which stand for time, and bytes, which stand for memory.

Every operation of a template is charged before it runs, or after it where earlier charges bound its cost.
Values may hold the same value many times, so that a few hundred bytes stand for a tree of billions of nodes: an
operation that walks a value is charged for the whole tree, and the walk that counts it stops when the budget is spent.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from jinja2 import pass_context
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_CHARS: Final = 16 << 20
"""Limit for the characters of a rendered prompt, and of any value that a template computes."""

MAX_STEPS: Final = 4_000_000
"""Limit for the steps of one rendering; a step takes about as long as a pass of an empty loop."""

MAX_BYTES: Final = 512 << 20
"""Limit for the bytes of all values that one rendering makes, those that it drops at once included."""

MAX_ITEMS: Final = 1_000_000
"""Limit for the items of a list that a template makes."""

_MAX_SHOWN: Final = MAX_CHARS // 8
"""Limit for lists and objects that are written as text: a character takes up to ten where it is not printable."""
_MAX_BITS: Final = 4096
_CHARS_A_STEP: Final = 256
_BYTES_A_STEP: Final = 1024
_SIZED: Final[tuple[Any, ...]] = (list, tuple, range, type({}.keys()), type({}.values()), type({}.items()))
_ATTRIBUTES: Final = "_Namespace__attrs"


class TemplateLimitError(Exception):
    """The template would take more steps or memory than the limits allow."""


class TemplateBudget:
    """Remaining budget of one rendering."""

    def __init__(self, steps: int = MAX_STEPS, size: int = MAX_BYTES) -> None:
        self._steps = steps
        self._bytes = size

    def spend(self, steps: int = 1) -> None:
        """Take steps. Raises `TemplateLimitError` when none is left."""
        self._steps -= steps
        if self._steps < 0:
            raise _too_many_steps()

    def join(self, pieces: Iterable[str], between: str = "") -> str:
        """Return the pieces as one text. Raises `TemplateLimitError` as soon as it would be too large."""
        kept: list[str] = []
        size, gap = 0, len(between)
        for piece in pieces:
            size += len(piece) + gap
            if size > MAX_CHARS:
                raise _too_large()
            self._steps -= 1
            if self._steps < 0:
                raise _too_many_steps()
            kept.append(piece)
        text = between.join(kept)
        self.make(sys.getsizeof(text))
        return text

    def make(self, size: int) -> None:
        """Take memory, in bytes, and the time that it takes to fill it."""
        self._bytes -= size
        if self._bytes < 0:
            raise TemplateLimitError(f"it creates more than {MAX_BYTES >> 20} MiB of values")
        self._steps -= size // _BYTES_A_STEP
        if self._steps < 0:
            raise _too_many_steps()

    def made(self, value: Any) -> Any:
        """Charge the memory of a new value, without the values that it refers to; return the value."""
        if isinstance(value, str):
            check_size(len(value))
            self.make(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            check_items(len(value))
            self.make(sys.getsizeof(value))
        elif isinstance(value, int):
            check_integer(value)
        return value

    def weigh(self, value: Any) -> int:
        """Take the steps of walking all of a value; return its characters, one for each node among them."""
        if isinstance(value, str):
            self.spend(len(value) // _CHARS_A_STEP)
            return len(value)
        if value is None or isinstance(value, bool | float):
            return 8
        weight = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            weight += 1
            if isinstance(item, str):
                weight += len(item)
                if len(item) >= _CHARS_A_STEP:
                    self.spend(len(item) // _CHARS_A_STEP)
                continue
            if isinstance(item, dict):
                self.spend(len(item))
                waiting.extend(item)
                waiting.extend(item.values())
            elif isinstance(item, _SIZED):
                self.spend(1 + len(item) // 2)
                waiting.extend(item)
            elif isinstance(item, Namespace):
                self.spend()
                waiting.append(object.__getattribute__(item, _ATTRIBUTES))
            elif isinstance(item, int):
                check_integer(item)
        return weight

    def text(self, value: Any) -> str:
        """Return `str(value)`; a text is returned unchanged."""
        if isinstance(value, str):
            return value
        if not isinstance(value, bool | float) and self.weigh(value) > _MAX_SHOWN:
            raise TemplateLimitError(f"a value has more than {_MAX_SHOWN} characters as text")
        return self.made(str(value))  # type: ignore[no-any-return]

    def counted(self, values: Iterable[Any], cost: int = 1) -> Iterator[Any]:
        """Yield the values; each takes `cost` steps."""
        for value in values:
            self._steps -= cost
            if self._steps < 0:
                raise _too_many_steps()
            yield value

    def listed(self, values: Any) -> list[Any]:
        """Return the values as a list."""
        if isinstance(values, (str, dict, _SIZED)):
            check_items(len(values))
            self.make(8 * len(values))
            return [*values]
        kept = []
        for value in self.counted(values):
            self.make(8)
            kept.append(value)
            check_items(len(kept))
        return kept


BRIEF_STEPS: Final = 20_000
"""Limit for the steps of a rendering on the event loop: about a millisecond."""

_BRIEF_BYTES: Final = 1 << 20
_brief: ContextVar[bool] = ContextVar("brief_renderings", default=False)
_current: ContextVar[TemplateBudget] = ContextVar("template_budget")
the_budget = _current.get
"""Returns the budget of the current rendering."""


@contextlib.contextmanager
def metered() -> Iterator[TemplateBudget]:
    """Charge the work of the block to a separate budget, which it returns."""
    budget = TemplateBudget(BRIEF_STEPS, _BRIEF_BYTES) if _brief.get() else TemplateBudget()
    before = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(before)


@contextlib.contextmanager
def brief_renderings() -> Iterator[None]:
    """Limit renderings in the block to `BRIEF_STEPS` steps."""
    before = _brief.set(True)
    try:
        yield
    finally:
        _brief.reset(before)


def joined(pieces: Iterable[str], between: str = "") -> str:
    """Return the pieces as one text, charged to the current rendering."""
    return the_budget().join(pieces, between)


# Filters of every template. Each takes the context, so that none is computed while a template is compiled.


@pass_context
def shown_text(context: Context, value: Any) -> str:
    """Return a value as the text that is shown, charged for unless it is a text."""
    return value if type(value) is str else the_budget().text(value)


@pass_context
def charge_items(context: Context, values: Iterable[Any], cost: int) -> Iterator[Any]:
    """Charge for each value as it is taken."""
    return the_budget().counted(values, cost)


@pass_context
def charge_steps(context: Context, cost: int) -> bool:
    """Charge for steps; always true."""
    the_budget().spend(cost)
    return True


@pass_context
def charge_value(context: Context, value: Any) -> Any:
    """Charge for a value that was made."""
    return the_budget().made(value)


@pass_context
def charge_operand(context: Context, value: Any) -> Any:
    """Charge for a value that is compared: comparing walks at most all of it."""
    if isinstance(value, Iterator):
        value = the_budget().listed(value)
    the_budget().weigh(value)
    return value


def check_size(size: int) -> None:
    """Raise `TemplateLimitError` for a text of more than `MAX_CHARS` characters."""
    if size > MAX_CHARS:
        raise _too_large()


def _too_large() -> TemplateLimitError:
    return TemplateLimitError(f"a value has more than {MAX_CHARS} characters")


def _too_many_steps() -> TemplateLimitError:
    return TemplateLimitError(f"it takes more than {MAX_STEPS} steps")


def check_items(count: int) -> None:
    """Raise `TemplateLimitError` for a list of more than `MAX_ITEMS` items."""
    if count > MAX_ITEMS:
        raise TemplateLimitError(f"a list has more than {MAX_ITEMS} items")


def check_integer(value: int) -> None:
    """Raise `TemplateLimitError` for an integer that takes long to compute with."""
    if value.bit_length() > _MAX_BITS:
        raise TemplateLimitError("a number is too large")
