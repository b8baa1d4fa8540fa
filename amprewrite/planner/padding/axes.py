"""Find which dims of a graph are the same axis, and which dims consist of several axes.

A dim is an ordered list of axes, outer to inner. For example, a view that splits a dim of 100 into (4, 25) shows that the dim consists of
two axes. Axes that must have the same extent are joined, as in union-find. An axis that turns out to consist of several axes is split
wherever it is used. So three kinds of pads are all described as a pad of one axis: at the end of a dim, inside every attention head, and
inside every chunk of a fused weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from amprewrite.ir.op_graph import DisjointSets, Size


class Axes:
    """All axes of one graph. An axis is a dim that one or several tensors have, or one of the factors into which a view splits a dim.

    Each axis has a number, which the methods take and return. `unify` joins axes that turn out to be the same, and splits an axis that
    turns out to consist of two. So a number stored earlier may be out of date: pass stored axes through `leaves` before use.
    """

    def __init__(self) -> None:
        self._size: list[Size] = []
        self._joined = DisjointSets[int]()
        self._parts: dict[int, tuple[int, ...]] = {}
        """For each axis that was split: the (outer, inner) axes of which it consists."""

    def new(self, size: Size) -> int:
        """Add an axis of extent `size` and return its number."""
        self._size.append(size)
        return len(self._size) - 1

    def find(self, axis: int) -> int:
        """Return the axis that stands for `axis` and all axes joined to it."""
        return self._joined.find(axis)

    def size(self, axis: int) -> Size:
        return self._size[self.find(axis)]

    def leaves(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the unsplit axes of which the list `axes` consists now, outer to inner."""
        found: list[int] = []
        stack = list(reversed(axes))
        while stack:
            axis = self.find(stack.pop())
            parts = self._parts.get(axis)
            if parts is None:
                found.append(axis)
            else:
                stack.extend(reversed(parts))
        return tuple(found)

    def unify(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Make two lists of axes the same: join axes of equal size, and split an axis where the other list is finer.

        Return False, and change nothing, if the sizes do not allow this.
        """
        left, right = list(self.leaves(one)), list(self.leaves(other))
        if not self._feasible([self.size(a) for a in left], [self.size(a) for a in right]):
            return False
        while left and right:
            a, b = self.find(left.pop()), self.find(right.pop())
            a_parts, b_parts = self._parts.get(a), self._parts.get(b)
            if a_parts is not None or b_parts is not None:  # an axis that was split earlier: compare its parts instead
                left += a_parts or (a,)
                right += b_parts or (b,)
                continue
            size_a, size_b = self.size(a), self.size(b)
            if a == b:
                continue
            if size_a == size_b:
                self._joined.join(a, b)
            elif isinstance(size_a, int) and isinstance(size_b, int) and size_a > size_b:
                left += self._split(a, size_b)
                right.append(b)
            else:
                right += self._split(b, size_a)
                left.append(a)
        return True

    def _split(self, axis: int, inner: Size) -> tuple[int, int]:
        size = self.size(axis)
        assert isinstance(size, int) and isinstance(inner, int)
        parts = (self.new(size // inner), self.new(inner))
        self._parts[axis] = parts
        return parts

    @staticmethod
    def _feasible(left: list[Size], right: list[Size]) -> bool:
        left, right = list(left), list(right)
        while left and right:
            a, b = left.pop(), right.pop()
            if a == b:
                continue
            if not isinstance(a, int) or not isinstance(b, int) or min(a, b) < 2:
                return False
            if max(a, b) % min(a, b):
                return False
            if a > b:
                left += [a // b, b]
                right.append(b)
            else:
                right += [b // a, a]
                left.append(a)
        return not left and not right
