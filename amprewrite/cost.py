"""Seconds that a node or a cast takes, on a roofline: launch cost plus bytes moved over bandwidth.

Matmuls and convolutions are not priced: the lists fix their colour. What is left for the planner is bound by memory,
so bytes and launches are the whole story. A step of training pays every forward cast a second time in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from amprewrite.colour import OpKind
from amprewrite.devices import Device
from amprewrite.formats import FP32, Format
from amprewrite.op_graph import OpNode

RISK = 0.02
"""Share of a launch that running a rounding op low must save before it is preferred: ties go to accuracy."""
FREE_PROMOTION = 0.1
"""Share of a cast that a low operand beside a high one costs: nothing forward, a cast of its gradient in backward."""


@dataclass(frozen=True)
class CostModel:
    device: Device
    low: Format
    training: bool

    def op(self, node: OpNode, fmt: Format) -> float:
        """Seconds that the op takes with its result in `fmt`, beyond what it takes in any format."""
        seconds = 2 * node.numel * fmt.bytes / self.device.bandwidth
        if fmt is not FP32 and node.kind is not OpKind.CLEAR:
            seconds += RISK * self.device.launch
        return seconds * (3 if self.training else 1)

    def cast(self, node: OpNode) -> float:
        """Seconds that one copy of the node's result in the other format takes."""
        seconds = self.device.launch + node.numel * (FP32.bytes + self.low.bytes) / self.device.bandwidth
        return seconds * (2 if self.training else 1)
