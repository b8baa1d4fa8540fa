"""Keep in fp32 the sums that update a value many times: small steps, `x = x + 0.1 * f(x)`, and running sums, `h = 0.9 * h + u[:, t]`.

Each sum rounds all of x in a low format, and the errors add up. In bf16 sixty steps of a tenth lose 3 %, but 0.2 % if the sums are fp32, as
torch.autocast keeps them. Small steps occur in solvers of differential equations, samplers, and networks with scaled residuals
(Inception-ResNet v2, EDSR, LayerScale). Examples are Euler's `x + (s[i + 1] - s[i]) * f(x)`, and DDIM, which also scales x up and down.
Running sums occur in recurrences.

1. A sum *continues* an earlier sum if only elementwise ops, and ops that move or choose elements, lead from the earlier sum to it.
2. A value that is added on the way is a *branch* of the earlier sum if a product computes it from this sum, as f does in `x + 0.1 * f(x)`.
   It is small if its factor, here 0.1, is at most a quarter of that of the earlier sum, or contains a step size whose value is known only
   at run time (`ir/evidence/summands.py`). A chain of at least `MANY` sums with small branches stays fp32. The first sum may continue a
   value that is no sum. A sum that a loop repeats counts as a whole chain. In an ONNX file, so does a value that each iteration of a loop
   adds to or scales, such as a time `t = t + dt`.
3. torch.autocast holds a chain of sums in fp32 if its first value is a looked-up row, a learnt state, zeros or an input. Such a chain of at
   least `STREAM` sums of any kind stays fp32. Examples are running sums and residual streams. Each sum must add a value that comes from a
   product, unless a computed factor, such as a gate, scales the earlier sum on all paths to the later sum. A norm does not end a
   chain, because `x = norm(x + f(x))` carries the roundings of x on. In an ONNX file fewer such chains stay fp32, because each cast is a
   kernel, and the file need not be as exact as torch.autocast. There a norm ends a chain, running sums need `MANY` sums, and chains that
   continue through branches, such as residual streams, need `DEEP`.
4. The ops that pass the value from one sum of a chain to the next stay fp32, too. The ops of f, and the scaling of its result, are left to
   later passes, because torch.autocast rounds there, too.
5. Forced colours and overrides stay. Tied nodes (with shared memory or a shared kernel) get one colour.

Op names hard-coded in this pass: `lerp`, which scales its first operand by one minus its weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from amprewrite.ir.evidence.summands import Factor, Summands, joined
from amprewrite.ir.held_wide import FACTORS, FILE, SUMS, held_wide, is_product
from amprewrite.ir.op_graph import OpNode
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind, Reason

MANY = 8
"""Least length of a chain with small branches. One rounding in bf16 is off by up to 0.4 %, eight in the same direction by 3 %."""
STREAM = 4
"""Least length of a chain of sums that stays fp32 because torch.autocast holds it in fp32. A product that reads the last sum rounds three
times: both operands and its result. Four low sums add four roundings to these three, so that the error grows more than 1.5 times."""
DEEP = 32
"""Least number of sums of a residual stream that stays fp32 in an ONNX file. Their roundings are independent, so 32 of them are off by
about six times the error of one. Networks of a dozen layers have 25 sums and stay below this limit."""
FEW = 16
"""Largest number of ops on a path from a sum back to the earlier sum that it updates. One step of DDIM has four, and its branch as many."""
LINEAR = ops_with(Trait.LINEAR_IN_FIRST, Trait.BOUNDS)
"""Copies, views, conversions and bounds. Their result counts as equal to their only operand if both have the same number of elements."""
ONE = Factor()
ENDS = ops_with(Trait.HAS_STEPS, Trait.SHARES_OUT)
"""Ops at which a path ends, because their results do not continue the value: roundings, comparisons and softmax."""
NORMS = ops_with(Trait.TAKES_MEAN_AWAY)


class RepaintSmallSteps(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        if problem.repeated or sum(node.op in SUMS for node in problem.graph) >= STREAM:
            steps, running = _Sums(problem).found()
            for found, reason in ((steps, Reason.SMALL_STEPS), (running, Reason.RUNNING_SUM)):
                for name in sorted(found, key=problem.graph.rank.__getitem__):
                    decisions.keep_high(problem, name, reason)
        decisions.tie(problem)


@dataclass(frozen=True)
class _Way:
    """A path from a sum back to an earlier value that the sum updates, as `h + f(h)` updates `h`."""

    passed: tuple[str, ...] = ()
    """Names of the ops on the path, the later sum included."""
    factor: Factor = ONE
    """The factor by which the ops on the path multiply the earlier value."""
    added: tuple[tuple[str, Factor], ...] = ()
    """Names of the values that the sums on the path add, each with its factor."""
    scaled: bool = False
    """True if the path multiplies the earlier value by a factor that was computed from a product, such as a gate."""
    branch: bool = False
    """True if a value that the path adds is a branch: a product computes it from the earlier value."""
    small: bool = False
    """True if the path adds branches, and all of them are small."""


_Ways = dict[str, dict[str, _Way]]
"""{name of a sum: {name of an earlier value that the sum updates: the path back to it}}, with the sums in the order of the graph."""


class _Sums:
    """Finds the sums of one graph that update one value many times, for instance `x = x + dx` in each step of a solver.

    A set of values is stored as an int with one bit for each value.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph, self.in_file = problem, problem.graph, problem.device == FILE
        self.ends = ENDS | NORMS if self.in_file else ENDS
        self.wide = held_wide(problem.graph, problem.device, problem.held)
        self.rounded = set[str]()
        """Names of the values downstream of a product, results of products included."""
        self.bit: dict[str, int] = {}
        """The bit of each value at which a path may end: sums, values without operands, and ops that no path may pass (`_hands_on`)."""
        self.made: dict[str, int] = {}
        """For each value: the set of the values with a bit from which it is computed, itself included, as an int."""
        self.by_products: dict[str, int] = {}
        """For each value: the set of the values with a bit from which it is computed through a product, as an int."""
        for node in problem.graph:
            self._read(node)

    def _read(self, node: OpNode) -> None:
        given = [operand.value for operand in node.operands]
        made = by_products = 0
        for value in given:
            made |= self.made.get(value, 0)
            by_products |= self.by_products.get(value, 0)
        product = is_product(node)
        self.by_products[node.name] = made if product else by_products
        if node.op in SUMS or not node.operands or not self._hands_on(node, node):
            self.bit[node.name] = 1 << len(self.bit)
            made |= self.bit[node.name]
        self.made[node.name] = made
        if product or not self.rounded.isdisjoint(given):
            self.rounded.add(node.name)

    def found(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return two sets of op names: chains of small steps `x = x + 0.1 * f(x)`, and chains of running sums `h = 0.9 * h + u[:, t]`.

        A chain consists of its sums, and of the ops between one sum and the next. Rules 2 and 3 at the top of this file define the chains.
        """
        ways = {node.name: dict(self._updated(node)) for node in self.graph if node.op in SUMS}
        steps = {name: small for name, of in ways.items() if (small := {before: way for before, way in of.items() if way.small})}
        sums = ways.keys() & self.wide
        wide = {name: {before: way for before, way in of.items() if before in sums} for name, of in ways.items() if name in sums}
        if self.in_file:
            plain = {name: {before: way for before, way in of.items() if not way.branch} for name, of in wide.items()}
            states = {node.name: dict(self._updated(node)) for node in self.graph if node.name in self.problem.repeated}
            running = self._in_a_row(plain, MANY) | self._in_a_row(wide, DEEP) | self._in_a_row(states, MANY)
        else:
            running = self._in_a_row(wide, STREAM)
        return self._in_a_row(steps, MANY), running & self.wide

    def _in_a_row(self, ways: _Ways, many: int) -> frozenset[str]:
        """Return the sums in chains of at least `many` sums, and the ops between them. Each sum of a chain updates the sum before it."""
        steps: dict[str, int] = {}
        for name, given in ways.items():
            turns = many if not self.problem.repeated.isdisjoint(given) else 1
            steps[name] = turns + max((steps.get(before, 0) for before in given), default=0)
        whole = dict(steps)
        for name in reversed(ways):
            for before in ways[name]:
                if before in whole:
                    whole[before] = max(whole[before], whole[name])
        kept = [name for name, length in whole.items() if length >= many]
        return frozenset([*kept, *(each for name in kept for way in ways[name].values() for each in way.passed)])

    def _updated(self, node: OpNode) -> Iterator[tuple[str, _Way]]:
        """Yield (name, path) for each earlier value that the sum `node` updates, as `x + 0.1 * f(x)` updates x.

        `path` leads from the sum back to the value. Rules 2 and 3 at the top of this file say which values count.
        """
        plain, scaled = dict[str, _Way](), dict[str, _Way]()
        waiting = deque([(node, _Way())])
        for _ in range(FEW**2):
            if not waiting:
                break
            last, way = waiting.popleft()
            if last is not node and last.name in self.bit:
                (scaled if way.scaled else plain).setdefault(last.name, way)
            if len(way.passed) < FEW and (last is node or self._hands_on(last, node)):
                waiting += self._before(last, way)
        starts = set[str]()
        # If a value has a plain and a scaled path, take the plain path. Plain paths come first, nearest value first, as `starts` expects.
        for name, way in {**plain, **{name: way for name, way in scaled.items() if name not in plain}}.items():
            adds = way.scaled or not self.rounded.isdisjoint(dict(way.added))
            if adds if node.op in SUMS else self._is_updated(node, name, way):
                branch = not way.scaled and any(self._is_branch(each, name) for each, _ in way.added)
                # The branch is no single small step if the path passes a nearer value that has a branch: such a path makes several steps.
                small = branch and starts.isdisjoint(way.passed) and self._is_small(way, name)
                starts |= {name} if branch else set()
                yield name, replace(way, branch=branch, small=small)

    def _hands_on(self, node: OpNode, to: OpNode) -> bool:
        """True if a path back from the later sum `to` to an earlier sum may contain `node`: it must be elementwise, or move elements.

        An op whose kernel computes in fp32 (`OpKind.INTERNAL`) counts as elementwise if it returns as many elements as `to`.
        """
        if node.role != "op" or is_product(node) or node.op in self.ends or node.name in self.problem.repeated:
            return False
        return node.kind in (OpKind.CLEAR, OpKind.INFER) or (node.kind is OpKind.INTERNAL and node.numel == to.numel)

    def _before(self, node: OpNode, way: _Way) -> Iterator[tuple[OpNode, _Way]]:
        parts = self.problem.summands.get(node.name, {})
        for place, operand in enumerate(node.operands):
            others = [other.value for other in node.operands if other is not operand]
            computed = not self.rounded.isdisjoint(others)
            scaled = way.scaled or (node.op in FACTORS and computed) or (node.op == "lerp" and not place and not parts and computed)
            added = [(other, way.factor * parts.get(other, ONE)) for other in (parts or others) if other != operand.value]
            added = [*way.added, *added] if node.op in SUMS else [*way.added]
            factor = way.factor * parts.get(operand.value, ONE)
            yield self.graph[operand.value], _Way((*way.passed, node.name), factor, tuple(added), scaled)

    def _is_updated(self, state: OpNode, before: str, way: _Way) -> bool:
        """True if a loop body computes the loop variable `state` from its old value `before` by adding to it or scaling it (path `way`)."""
        same = self.graph[before].precision_group == state.precision_group != ""
        return same and any(self.graph[each].op in SUMS | FACTORS for each in way.passed)

    def _is_branch(self, value: str, of: str) -> bool:
        """True if `value` is a branch of the earlier value `of` (rule 2 of this file): it depends on `of` through at least one product."""
        return bool(self.by_products[value] & self.bit[of])

    def _is_small(self, way: _Way, before: str) -> bool:
        """True if the path `way` adds only small branches of `before` (rule 2 of this file).

        If a branch is too large, but linear in other values, as `0.1 * y` is in y, the other values are judged in place of the branch.
        """
        terms = joined(way.added)
        for _ in range(FEW):
            large = [each for each, times in terms.items() if self._is_branch(each, before) and not times.is_small(way.factor)]
            latest = max((each for each in large if self._parts(each)), key=self.graph.rank.__getitem__, default=None)
            if latest is None:
                return not large
            times = terms.pop(latest)
            terms = joined([*terms.items(), *((part, times * factor) for part, factor in self._parts(latest).items())])
        return False

    def _parts(self, name: str) -> Summands:
        """Return {value that the op `name` adds up: its factor}; {} if the op is not known to be linear."""
        node = self.graph[name]
        if node.op in LINEAR and len(node.operands) == 1 and self.graph[node.operands[0].value].numel == node.numel:
            return self.problem.summands.get(name, {node.operands[0].value: ONE})
        return self.problem.summands.get(name, {})
