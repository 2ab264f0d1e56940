"""Which places of a lease's memory are in use, as each side knows it. Pure; not safe to use from several threads."""

from __future__ import annotations

from collections.abc import Sequence

from fd_core.disagg.connectors.contract import ConnectorError

from fd_connector_nixl.layout import Reference


class Arrivals:
    """What the decode side knows: which piece has arrived in which place, and how often each place was freed."""

    def __init__(self, pieces: range, window: int, value_bytes: int) -> None:
        self._pieces, self._value_bytes = pieces, value_bytes
        self._freed = [0] * window
        self._holders: dict[int, int] = {}
        """Index of the piece in each place that holds one."""
        self._arrived: dict[int, Reference] = {}
        self._done: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every piece has come and gone, so that nobody writes any more."""
        return len(self._done) == len(self._pieces)

    def landed(self, index: int, reference: Reference) -> None:
        """Note that the write of a piece is over; ignore a piece that cannot have been written."""
        if self._expected(index, reference):
            self._holders[reference.place] = index
            self._arrived[index] = reference

    def look(self, index: int, reference: Reference) -> bool:
        """Return whether a piece has arrived where a reference says. Raises `ConnectorError` if it never will."""
        if index in self._arrived:
            if self._arrived[index] != reference:
                raise ConnectorError("a reference leads to another place than the one that the piece was written to")
            return True
        if not self._expected(index, reference):
            raise ConnectorError("a reference leads to a place where no such piece can be")
        return False

    def done(self, index: int, reference: Reference) -> int:
        """Free the place of a piece that has arrived; return how often the place was freed."""
        if not self.look(index, reference):
            raise ConnectorError("a piece is said to be done before it came")
        del self._arrived[index], self._holders[reference.place]
        self._done.add(index)
        self._freed[reference.place] += 1
        return self._freed[reference.place]

    def _expected(self, index: int, reference: Reference) -> bool:
        place, turn, length = reference
        return (
            index in self._pieces
            and index not in self._done
            and index not in self._arrived
            and place < len(self._freed)
            and place not in self._holders
            and turn == self._freed[place] + 1
            and length <= self._value_bytes
        )


class Departures:
    """What the prefill side knows: how often each place was written to and, at the last look, freed."""

    def __init__(self, window: int) -> None:
        self._written = [0] * window
        self._freed = [0] * window

    def free(self) -> int | None:
        """Return the free place whose last write is the oldest; None if no place is known to be free."""
        places = [place for place, written in enumerate(self._written) if written == self._freed[place]]
        return min(places, key=self._written.__getitem__, default=None)

    def write(self, place: int) -> int:
        """Note that a place is written to; return its turn."""
        self._written[place] += 1
        return self._written[place]

    def learn(self, freed: Sequence[int]) -> None:
        """Take in the counts of the decode side's memory. Raises `ConnectorError` if they are impossible."""
        if any(not old <= new <= most for old, new, most in zip(self._freed, freed, self._written, strict=True)):
            raise ConnectorError("the decode worker's memory does not say what this lease's would")
        self._freed = list(freed)
