"""The encoder of images on one pack: from the pixels of an image to states that replace embeddings of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.models.decoder import DecoderModel
from fd_core.models.families.spec import ImageSpec
from fd_core.ops.contract import Array, Norm, Ops
from fd_core.types import Image, IntArray


class Merger(NamedTuple):
    """Weights from states of patches to states of tokens."""

    linears: tuple[Array, ...]
    norm: Norm | None = None
    """Of the merged states."""
    patch_norm: Norm | None = None
    """Of the states of patches."""
    then: tuple[Merger, ...] = ()
    """Further ones, see `MergerSpec.then`."""


class Tower(NamedTuple):
    """Some successive layers."""

    model: DecoderModel
    windowed: bool
    """True if they attend within windows."""
    merger: Merger | None
    """Of the states after them, if the decoder reads these."""


@dataclass(eq=False)
class ImageEncoder:
    """Encodes one image after another; layers attend to a whole image, or to a window of it."""

    ops: Ops
    spec: ImageSpec
    towers: tuple[Tower, ...]
    patch: Array
    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]
    """Of the pixels, divided by 255, of each channel."""
    table: npt.NDArray[np.float32] | None = None
    """[side, side, H], positions that are interpolated; None without any."""
    first: npt.NDArray[np.float32] | None = None
    """See `ImageSpec.first`."""
    newline: npt.NDArray[np.float32] | None = None
    """See `ImageSpec.newline`."""
    sum_norm: Norm | None = None
    """Of the sum of merged states, see `ImageSpec.mean_norm`."""
    _turned: tuple[int, int] = 0, 0
    """Grid for which the tower's rope tables are."""

    @cached_property
    def _boundaries(self) -> npt.NDArray[np.float32]:
        """Relative places at which the next row of the table of positions begins."""
        step = 1 / self.spec.side
        return (step + step * np.arange(self.spec.side - 1)).astype(np.float32)

    def tiles(self, image: Image) -> list[Image]:
        """Return the square tiles of an image whose tiles are joined, which are one below the other; else the image."""
        side = image.size[1]
        if self.newline is None or image.size[0] == side:
            return [image]
        data = np.frombuffer(image.pixels, np.uint8).reshape(-1, 3 * side * side)
        return [msgspec.structs.replace(image, size=(side, side), pixels=tile.tobytes()) for tile in data]

    def joined(self, tiles: list[Array], image: Image) -> Array:
        """Return the states [tokens, H] of an image from those of its tiles: the whole image, and the grid of others.

        `image.layout` has the rows and columns of tiles in the grid, the rows and columns of tokens that are cut off at
        each side of it, and those to which the others are resized.
        """
        if self.newline is None:
            return tiles[0]
        whole, *others = (self.ops.to_host(tile) for tile in tiles)
        width = len(self.newline)
        if not others:
            return self.ops.states_from_host(np.concatenate([whole, self.newline[None]]))
        rows, columns, top, left, *size = image.layout
        side = self.spec.side
        grid = np.stack(others).reshape(rows, columns, side, side, width).swapaxes(1, 2)
        grid = grid.reshape(rows * side, columns * side, width)[top : rows * side - top, left : columns * side - left]
        for axis, count in enumerate(size):
            grid = _resized(grid, count, axis)
        lines = np.concatenate([grid, np.broadcast_to(self.newline, (len(grid), 1, width))], axis=1)
        return self.ops.states_from_host(np.concatenate([whole, lines.reshape(-1, width)]))

    def grid(self, image: Image) -> tuple[int, int]:
        """Return rows and columns of patches in the image."""
        size = self.spec.patch_size
        return image.size[0] // size, image.size[1] // size

    def order(self, image: Image) -> tuple[IntArray, IntArray]:
        """Return int32[n], the patches of an image, row by row, in the order of windows, and the windows' sizes."""
        rows, columns = self.grid(image)
        if not self.spec.window:
            count = rows * columns
            return np.arange(count, dtype=np.int32), np.array([count + (self.first is not None)], np.int32)
        across = -(-columns // self.spec.window)
        row, column = np.indices((rows, columns)) // self.spec.window
        window = (row * across + column).ravel()
        return np.argsort(window, kind="stable").astype(np.int32), np.bincount(window).astype(np.int32)

    def positions(self, image: Image) -> IntArray:
        """Return int32[n], the rows of the table of positions for the patches of an image.

        A grid of another size than the table's is spread over it (Dehghani et al., "Patch n' Pack", 2023).
        """
        rows, columns = (
            np.searchsorted(
                self._boundaries,
                np.minimum(np.arange(count, dtype=np.float32) * np.float32(1 / count), np.float32(1 - 1e-6)),
                side="right",
            )
            for count in self.grid(image)
        )
        index: IntArray = (rows[:, None] * self.spec.side + columns).astype(np.int32).ravel()
        return index if self.first is None else np.concatenate([index[:1], index + 1])

    def interpolated(self, image: Image, table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return [n, H], the positions of the patches of an image, from the nearest rows and columns of the table."""
        side, weights = self.spec.side, []
        for count in self.grid(image):
            at = np.arange(count, dtype=np.float32)
            if self.spec.corners:
                at = at * np.float32((side - 1) / max(count - 1, 1))
            else:
                at = (at + np.float32(0.5)) * np.float32(side / count) - np.float32(0.5)
            far = np.abs(at.clip(0, side - 1)[:, None] - np.arange(side, dtype=np.float32))
            weights.append(np.maximum(1 - far, 0))
        rows = np.tensordot(weights[0], table, 1)
        values: npt.NDArray[np.float32] = np.matmul(weights[1], rows).reshape(-1, rows.shape[-1])
        return values

    def patches(self, image: Image) -> Array:
        """Return the stream [n, H] of an image before the first layer: its patches, and their positions."""
        (rows, columns), size = self.grid(image), self.spec.patch_size
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(*image.size, 3)
        values = (pixels[: rows * size, : columns * size].astype(np.float32) / np.float32(255) - self.mean) / self.std
        values = values.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        order, _ = self.order(image)
        values = values[order] if self.first is None else np.concatenate([values[:1], values[order]])
        x = self.ops.linear(self.ops.states_from_host(values), self.patch)
        if self.first is not None:
            row = self.ops.from_host(np.zeros(1, np.int32))
            x = self.ops.write_rows(x, row, self.ops.states_from_host(self.first[None]))
        tower = self.towers[0].model
        if tower.decoder.positions is not None:
            x = self.ops.add_positions(x, tower.decoder.positions, self.ops.from_host(self.positions(image)))
            return x if tower.decoder.embedding_norm is None else self.ops.normalize(x, tower.decoder.embedding_norm)
        if self.table is not None:
            x = self.ops.add(x, self.ops.states_from_host(self.interpolated(image, self.table)[order]))
        if self._turned != (rows, columns):
            self._turned = rows, columns
            tower.turn(np.indices((rows, columns)).reshape(2, -1)[:, order], 0)
        return x

    def tokens(self, states: Array, image: Image, merger: Merger) -> Array:
        """Return the states [tokens, H of the decoder] of an image from those of its patches after a tower."""
        (rows, columns), side = self.grid(image), self.spec.merge
        if self.first is not None:
            states = self.ops.gather_rows(states, self.ops.from_host(np.arange(1, rows * columns + 1, dtype=np.int32)))
        states = states if merger.patch_norm is None else self.ops.layer_norm(states, merger.patch_norm)
        if side > 1:
            places = np.argsort(self.order(image)[0]).astype(np.int32)
            places = places.reshape(rows // side, side, columns // side, side).transpose(0, 2, 1, 3).ravel()
            if self.sum_norm is not None:
                parts = [
                    self.ops.gather_rows(states, self.ops.from_host(part))
                    for part in places.reshape(-1, side**2).T.copy()
                ]
                states = self.ops.rms_norm(reduce(self.ops.add, parts), self.sum_norm)
            else:
                states = self.ops.gather_rows(states, self.ops.from_host(places))
            states = states.reshape(rows * columns // side**2, -1)
        for each in (merger, *merger.then):
            states = states if each.norm is None else self.ops.normalize(states, each.norm)
            for index, linear in enumerate(each.linears):
                states = self.ops.linear(self.ops.activate(states, self.spec.activation) if index else states, linear)
        return states


def _resized(values: npt.NDArray[np.float32], count: int, axis: int) -> npt.NDArray[np.float32]:
    """Return values of another count along an axis, interpolated linearly between the centres of the given ones."""
    given = values.shape[axis]
    if given == count:
        return values
    places = np.clip((np.arange(count) + 0.5) * (given / count) - 0.5, 0, given - 1)
    before = places.astype(np.int64)
    after = np.minimum(before + 1, given - 1)
    share = np.expand_dims((places - before).astype(np.float32), [each for each in range(values.ndim) if each != axis])
    found: npt.NDArray[np.float32] = values.take(before, axis) * (1 - share) + values.take(after, axis) * share
    return found
