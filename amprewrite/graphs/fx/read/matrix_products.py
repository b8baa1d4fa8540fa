"""Find the products of rows and a matrix in an fx graph. The operands of these products may be quantised to fp8.

This file knows the operands of `linear`, `matmul`, `mm` and `addmm`. It leaves out products inside a torch.func transform, products of a
tensor with itself, products with further factors such as `alpha`, and products plus a summand of more than one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import example_value, hint, named_arguments, transformed_nodes
from amprewrite.ir.cost import MatrixProduct
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with
from amprewrite.torch_internals.dispatch import is_traceable_wrapper_subclass

PRODUCTS = ops_with(Trait.READS_FP8)
FACTORS = {"beta": 1, "alpha": 1, "use_gelu": False, "out_dtype": None, "dtype": None, "out": None}
"""Arguments that change the product, each with the value that leaves the product unchanged."""


def read_matrix_products(graph: OpGraph, nodes: Mapping[str, torch.fx.Node], trained: Set[str]) -> dict[str, MatrixProduct]:
    """Return {name: product} for the matrix products that fp8 kernels could run. `trained` names the values that get gradients."""
    names = {node: name for name, node in nodes.items()}
    apart = transformed_nodes(next(iter(names)).graph) if names else set()
    found = dict[str, MatrixProduct]()
    for name, node in nodes.items():
        call = node.op in ("call_function", "call_method") and op_name(node.target) in PRODUCTS and node not in apart
        read = operands(node) if call and graph[name].carries_fp32 else None
        if read is None or any(each not in names for each in read):
            continue
        (x, w), made = (names[each] for each in read), example_value(node)
        versions = {operand.value: operand.write_version for operand in graph[name].operands if not operand.twice}
        matrix, rows = example_value(read[1]), example_value(read[0])
        if x == w or not {x, w} <= versions.keys() or not all(map(_is_plain, (matrix, rows, made))):
            continue
        transposed = transposes(node)
        inner, columns = (hint(matrix.shape[dim]) for dim in ((0, 1) if transposed else (1, 0)))
        many = graph[x].numel // max(inner, 1)
        found[name] = MatrixProduct(x, w, versions[x], versions[w], many, inner, columns, x in trained, w in trained, transposed)
    return found


def operands(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """Return the operands (rows x, matrix w) of a product; None for a product that fp8 kernels do not compute.

    Such kernels take x with at least two dims, w with two, and at most one summand, with one dim. If an argument in FACTORS changes the
    product, the result is None, too.
    """
    given = named_arguments(node)
    if any(given.get(name, plain) not in (plain, None) for name, plain in FACTORS.items()):
        return None
    *summand, x, w = list(given.values())[:3] if op_name(node.target) == "addmm" else list(given.values())[:2]
    shapes = [_dims(each) for each in (x, w, *summand)]
    if shapes[0] < 2 or shapes[1] != 2 or shapes[2:] not in ([], [1]):
        return None
    return x, w


def bias_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node that makes the summand (bias) of a product; None if the product has no summand."""
    given = named_arguments(node)
    return next(iter(given.values())) if op_name(node.target) == "addmm" else given.get("bias")


def transposes(node: torch.fx.Node) -> bool:
    """True if the product `node` computes x · w; False if it computes x · wᵀ, as `linear` does."""
    return op_name(node.target) != "linear"


def _dims(node: object) -> int:
    value = example_value(node) if isinstance(node, torch.fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not is_traceable_wrapper_subclass(value)
