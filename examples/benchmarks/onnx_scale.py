"""How long `rewrite_onnx` takes for chains of 200 to 6,400 nodes: the time per node should stay flat.

Times are processor seconds: everything runs on one thread, and other work on the machine does not count.

python examples/benchmarks/onnx_scale.py [SIZE ...]
"""

from __future__ import annotations

import sys
import time

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from amprewrite.api.onnx.convert import rewrite_onnx

SIZES = (200, 400, 800, 1600, 3200, 6400)


def chain(length: int) -> onnx.ModelProto:
    """MatMul, Add, Tanh, Add, and again."""
    held = {"w": np.eye(16, dtype=np.float32) / 2, "b": np.full(16, 0.1, np.float32)}
    ops = [("MatMul", ["w"]), ("Add", ["b"]), ("Tanh", []), ("Add", ["b"])]
    names = ["x", *(f"v{index}" for index in range(length))]
    nodes = [
        helper.make_node(op, [names[index], *more], [names[index + 1]], name=f"n{index}")
        for index, (op, more) in ((index, ops[index % 4]) for index in range(length))
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 16]) for name in (names[0], names[-1]))
    graph = helper.make_graph(nodes, "chain", [x], [y], [numpy_helper.from_array(array, name) for name, array in held.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def main() -> None:
    rewrite_onnx(chain(50))  # imports and caches
    print(f"{'nodes':>6} {'rewrite':>9} {'per node':>9} {'with checks':>12} {'casts':>6}")
    for length in map(int, sys.argv[1:] or SIZES):
        model = chain(length)
        seconds = []
        for verify in (False, True):
            started = time.process_time()
            result = rewrite_onnx(model, verify=verify)
            seconds.append(time.process_time() - started)
        casts = sum(not cast.weight for cast in result.plan.casts)
        print(f"{length:6} {seconds[0]:7.2f} s {1e6 * seconds[0] / length:6.0f} us {seconds[1]:10.2f} s {casts:6}")


if __name__ == "__main__":
    main()
