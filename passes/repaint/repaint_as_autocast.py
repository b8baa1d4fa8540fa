"""Keep a value in fp32 if torch.autocast keeps it in fp32, unless rounding it does no harm.

torch.autocast rounds at products. It keeps in fp32 the results of other ops on inputs and weights, and of ops on its fp32 list. Code may
rely on that: `(x - mean) / std` of large values, `1 - sigmoid(y.float())`, differences of times, thresholds. So fp32 is the default for an
op about which nothing is known. An op runs low only if rounding its result and its operands does no harm.

Rounding a value does no harm if products alone read it, directly or through views, because products round their operands anyway. It does
no harm either if five conditions hold:

1. The value has no offset of unknown size (`ir/held_wide.py`), because a product or a norm made it, or because it is learnt.
2. No reader magnifies the rounding. Differences and batch norms magnify it, and so do ops that pass the value on to such a reader. If
   products have not yet rounded the value as far as the low format does, other readers magnify it as well: logarithms, softmax, ops whose
   result jumps (`floor`) or selects positions (`topk`), in training ops whose slope jumps (`relu`) or fades (`tanh`), denied and unlisted
   ops, and results of the graph. Other norms, averages, products and casts to a low format do not magnify it.
3. It is not computed from several weights, as in a spectral norm: each step would round whole weights once more.
4. At most eight readers send gradients back (`Problem.read_by_many`). Autograd adds these gradients one by one in the format of the value:
   a sum of fifty in bf16 loses a tenth. Under torch.autocast an fp32 value has a copy for every reader, and the gradients add up in fp32.
   If the value stays fp32, `plan-casts` lets fp32 add up the gradients of its readers, two by two.
5. In training, the op broadcasts no weight that other ops broadcast, too (`Roundings.sums`). The gradient of such a weight is a sum over
   many elements, and a low op rounds this sum. The sums of two ops may cancel. An example is the scale `s` of a quantiser, which divides
   and multiplies by it: `(x / s).round() * s`. Then 0.2 % of one sum may be 20 % of their difference.

Uniform draws stay fp32, whoever reads them: in a low format PyTorch rounds the bounds, too, and turns a draw that rounds up to the upper
bound into the lower bound. So the mean of `uniform_(0.99, 1.01)`, with which routers of experts jitter their inputs, is 0.994 in bf16.

A difference from the mean of each sample, `x - x.mean(-1)`, counts as a norm. Forced colours and overrides stay. Tied nodes
(with shared memory or a shared kernel) get one colour.

Judged by: tests/passes/test_repaint_unrounded.py, test_kinks.py, test_squared_distances.py and test_error_laws.py, and by
tests/runtime/test_products_told.py.

Op names hard-coded in this pass: `getitem`. If it reads an integer result of an op, the op returns positions.
"""

from __future__ import annotations

from collections import defaultdict

from amprewrite.ir.held_wide import AVERAGES, AWAY, CONVERTS, DRAWS, FACTORS, LOGS, NORMS, data_of, held, is_product, rounds
from amprewrite.ir.op_graph import Demand, OpNode
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Held, OpKind, Reason

STEPS, SLOPES, BATCH_NORMS = ops_with(Trait.HAS_STEPS), ops_with(Trait.SLOPE_VARIES), ops_with(Trait.TAKES_BATCH_MEAN)
LOOKS_UP, PATCHES = ops_with(Trait.LOOKS_UP), ops_with(Trait.ADDS_PATCHES)
LEVEL = AVERAGES | NORMS
"""Averages and norms. Batch norms magnify every rounding, the other ops only that of a value that may have an offset (`Held.EXACT`)."""
WHOLE = LOGS | ops_with(Trait.SHARES_OUT)
"""Ops that magnify the rounding error of a value that no product has rounded before: logarithms and softmax."""


class RepaintAsAutocast(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        found = Roundings(problem)
        for node in problem.graph:
            if node.role != "op" or found.held[node.name] is Held.LOW or is_product(node):
                continue
            if node.name in found.sums:
                decisions.keep_high(problem, node.name, Reason.LOW_BACKWARD, because_of=found.sums[node.name])
            elif node.op in DRAWS:
                decisions.keep_high(problem, node.name, Reason.DRAWN)
            elif not found.is_free(node):
                reader = found.magnifies.get(node.name, "")
                decisions.keep_high(problem, node.name, Reason.MAGNIFIED if reader else Reason.UNROUNDED, because_of=reader)
            elif node.name in problem.read_by_many:
                decisions.keep_high(problem, node.name, Reason.READ_BY_MANY)
        decisions.tie(problem)


class Roundings:
    """Finds, for each value of a graph, whether rounding it to the low format does harm, because a reader would magnify the error."""

    def __init__(self, problem: Problem) -> None:
        self.graph, self.held, self.trained = problem.graph, held(problem), problem.trained
        self.magnifies: dict[str, str] = dict.fromkeys(problem.needs_bits, problem.name)
        """{value: reader that magnifies its rounding itself or through later ops; the graph's name if the reader is outside the graph}."""
        self.rounded_anyway: set[str] = set()
        """Values that products alone read, directly or through views."""
        self.of_weights = {node.name for node in problem.graph if node.role in ("parameter", "buffer")}
        """Weights, and values computed from weights alone. Slices, looked-up rows and expanded views of weights do not count."""
        for node in problem.graph:
            given = [each.value for each in node.operands]
            if not given or not self.of_weights.issuperset(given):
                continue
            whole = node.op not in LOOKS_UP and all(self.graph[each].numel == node.numel for each in given)
            if whole or node.kind is not OpKind.CLEAR:
                self.of_weights.add(node.name)
        self.sums = self._sums() if problem.training or problem.policy.parity is not None else {}
        """Maps ops that broadcast a weight to that weight, if other ops broadcast it, too. Empty if no gradients are recorded."""
        data = {node.name: {operand.value for operand in data_of(node)} for node in self.graph}
        moved_on: set[str] = set()
        """Ops that round their operands, and ops that move, select or scale elements if only ops in this set read their results."""
        for node in reversed(list(self.graph)):  # go backwards, so that the readers of a value are judged before the value
            readers = [each for each in self.graph.readers(node.name) if node.name in data[each.name]]
            harmed = next((each.name for each in readers if self._harms(each, node.name) or self._hands_harm_on(each, node.name)), "")
            if harmed:
                self.magnifies.setdefault(node.name, harmed)
            if readers and moved_on.issuperset([each.name for each in readers]) and node.name not in problem.needs_bits:
                self.rounded_anyway.add(node.name)
            if rounds(node) or (node.name in self.rounded_anyway and self._moves(node)):
                moved_on.add(node.name)

    def _sums(self) -> dict[str, str]:
        """Return {op that broadcasts a weight: the weight} for weights that several ops broadcast (condition 5 of this file).

        An op may also broadcast a view of the weight, or a value that is computed from weights alone. Products and norms are left out,
        because their own kernels add up the gradients.
        """
        behind: dict[str, set[str]] = {}
        readers: dict[str, set[str]] = defaultdict(set)
        for node in self.graph:
            given = [each for each in node.operands if each.value in behind]
            moves = node.kind is OpKind.CLEAR and len(node.operands) == 1 and node.op not in LOOKS_UP  # a looked-up row is no view
            if node.role == "parameter" and node.name in self.trained:
                behind[node.name] = {node.name}
            elif given and (node.name in self.of_weights or moves):
                behind[node.name] = set().union(*(behind[each.value] for each in given))
            elif node.name in self.trained and not is_product(node):
                for each in given:
                    if each.demand is Demand.PROMOTE and self.graph[each.value].numel < node.numel:
                        for weight in behind[each.value]:
                            readers[weight].add(node.name)
        return {name: weight for weight, names in readers.items() if len(names) > 1 for name in names}

    def is_free(self, node: OpNode) -> bool:
        """True if an op may run in the low format, because rounding its result and its operands does no harm."""
        anyway, of_weights = node.name in self.rounded_anyway, node.name in self.of_weights and len(node.operands) > 1
        if anyway and self._moves(node) and not of_weights:
            return True
        if not anyway and (self.held[node.name] is Held.EXACT or node.name in self.magnifies):
            return False
        given = [each.value for each in data_of(node) if not each.scalar]
        return not of_weights and all(self.held[each] > Held.EXACT and not self._harms(node, each) for each in given)

    def _moves(self, node: OpNode) -> bool:
        """True if rounding the operand is about as exact as rounding the result: the op moves, selects or scales elements of one tensor."""
        if node.kind is not OpKind.CLEAR and node.op not in FACTORS:
            return False
        return sum(not each.scalar for each in node.operands) == 1 and not self._turns(node)

    def _turns(self, node: OpNode) -> bool:
        """True if a small rounding of an operand may change the result or a gradient a lot, as for `floor`, or for `relu` in training."""
        jumps = node.op in STEPS or (node.op in CONVERTS and node.dtype.startswith(("int", "uint", "bool")))
        places = any(reader.op == "getitem" and not reader.carries_fp32 for reader in self.graph.readers(node.name))
        return jumps or places or (node.op in SLOPES and node.name in self.trained)

    def _harms(self, node: OpNode, value: str) -> bool:
        """True if an op would itself magnify the rounding error of its operand `value`, as a difference does."""
        exact = self.held[value]
        if rounds(node) or exact is Held.LOW:
            return False
        if node.op in LEVEL or self._is_norm(node):
            return exact is Held.EXACT or node.op in BATCH_NORMS
        if node.op in AWAY | PATCHES:
            return True
        whole = node.role == "output" or node.kind in (OpKind.DENY, None) or node.op in WHOLE
        return exact < Held.ROUNDED and (whole or self._turns(node))

    def _is_norm(self, node: OpNode) -> bool:
        """True if an op subtracts from a value its mean over the dims of each sample, as layer, group and instance norms do.

        A mean over the batch does not count, because samples may have a common part that dwarfs their differences. A mean over dims other
        than the last does not count either if the value is an average itself, since the elements of an average may differ by little.
        """
        given = [operand.value for operand in node.operands]
        for mean in (self.graph[each] for each in given if node.op in AWAY and self.graph[each].op in AVERAGES):
            of = next((operand.value for operand in mean.operands if operand.value in given), "")
            if of and len(mean.shape) == len(node.shape) and mean.shape[:1] == node.shape[:1]:
                return mean.shape[-1:] == (1,) or self.graph.seen(of).op not in AVERAGES
        return False

    def _hands_harm_on(self, node: OpNode, value: str) -> bool:
        """True if `node` passes the rounding error of its operand `value` on to its result, and the error does harm there or later.

        The error does harm if a later op magnifies it. It also does harm if the result of `node` may have an offset of unknown size
        (`Held.EXACT`), but `value` has no such offset, and `node` is no average.
        """
        if rounds(node) or node.kind in (OpKind.DENY, None) or not node.carries_fp32 or node.op in WHOLE | NORMS:
            return False
        kept = self.held[node.name] is Held.EXACT is not self.held[value]
        return node.name in self.magnifies or (kept and node.op not in AVERAGES)
