"""Listing, SVG, DOT, notebook and Model Explorer views say what the plan says, on plans of one graph and of several."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.report.cast_plan import CastPlan
from amprewrite.report.counts import SCREEN, amount, by_impact, casts_by_kind, module_tree, node_bytes
from amprewrite.report.pictures.layout import draw, nest, place
from amprewrite.tables.errors import EmitError
from amprewrite.tables.vocabulary import Colour

XML = "{http://www.w3.org/2000/svg}"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, layers: int, broken: bool = False) -> None:
        super().__init__()
        self.layers, self.head, self.broken = nn.ModuleList([Layer() for _ in range(layers)]), nn.Linear(16, 4), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.head(x).exp().sum(-1)


@pytest.fixture(scope="module", params=[False, True], ids=["one graph", "two graphs"])
def plan(request: pytest.FixtureRequest) -> CastPlan:
    return amprewrite.plan(Tower(3, request.param), (torch.randn(4, 16),), dtype="bf16")


def test_a_cast_that_a_file_gives_no_reader_is_listed(plan: CastPlan) -> None:
    written = json.loads(plan.to_json())
    written["regions"][0]["casts"][0]["users"] = []
    assert "layer_norm:bf16 = layer_norm.to(bf16)" in CastPlan.from_json(json.dumps(written)).listing()


def test_the_listing_has_a_line_for_every_op_and_every_cast(plan: CastPlan) -> None:
    lines = plan.listing().splitlines()
    code = [line for line in lines if not line.lstrip().startswith("#")]
    ops = [node for node in plan.nodes if node.role == "op"]
    assert len(code) == len(ops) + len(plan.casts)
    for node in ops:
        (line,) = [line for line in code if line.split()[0] == node.name.rpartition("/")[2] and f"= {node.op}(" in line][:1]
        assert node.colour.value in line
    assert any("# layers.1.up: 1 low, 0 high" in line for line in lines)
    assert any("linear = linear(" in line and "self.weight:bf16" in line and "test_render.py:" in line for line in lines)
    assert all(len(line) <= 60 for line in plan.listing(width=60).splitlines())


def test_the_folded_listing_counts_right_and_merges_layers(plan: CastPlan) -> None:
    root = module_tree(plan)
    ops = [node for node in plan.nodes if node.role == "op"]
    assert (root.ops, root.low) == (len(ops), sum(node.colour is Colour.LOW for node in ops))
    assert root.casts + root.weight_casts == len(plan.casts)
    assert root.bytes == sum(map(node_bytes, ops)) and root.flops == sum(node.flops for node in ops)
    lines = amprewrite.plan(Tower(60), (torch.randn(4, 16),), dtype="bf16").listing(fold=True).splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= 80
    assert any("×)" in line for line in lines)


def test_svg_is_xml_with_every_op_and_cast(plan: CastPlan, tmp_path: Path) -> None:
    text = plan.to_svg(tmp_path / "plan.svg", depth=9)
    assert (tmp_path / "plan.svg").read_text() == text
    root = ElementTree.fromstring(text)
    drawn = draw(plan)
    tips = [tip.text for group in root.iter(f"{XML}g") for tip in group.iter(f"{XML}title")]
    assert sorted(tips) == sorted(f"{n.name}: {n.why()}" for n in drawn.nodes if n.role == "op")
    marks = [element for element in root.iter(f"{XML}path") if element.get("fill") == "#8b3fe0"]
    assert len(marks) == sum(bool(edge.cast) for edge in drawn.edges) > 0
    shut = ElementTree.fromstring(plan.to_svg(depth=0))
    assert len(list(shut.iter(f"{XML}g"))) < len(tips)


def test_png(plan: CastPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py", reason="the png extra is not installed")
    path = plan.to_png(tmp_path / "plan.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(EmitError, match="cannot be written"):
        plan.to_png(tmp_path / "gone" / "plan.png")
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(EmitError, match=r"pip install 'amprewrite\[png\]'"):
        plan.to_png(tmp_path / "plan.png")


def test_dot_names_every_drawn_node_once(plan: CastPlan, tmp_path: Path) -> None:
    text = plan.to_dot(tmp_path / "plan.dot")
    drawn = draw(plan)
    assert text.count("tooltip=") == len(drawn.nodes)
    assert text.count("shape=diamond") == len({(e.source, e.cast) for e in drawn.edges if e.cast})
    assert text.count("{") == text.count("}")
    if shutil.which("dot"):
        assert subprocess.run(["dot", "-Tsvg", str(tmp_path / "plan.dot")], capture_output=True).returncode == 0


def test_model_explorer_data_follows_its_format(plan: CastPlan, tmp_path: Path) -> None:
    data = json.loads(plan.to_model_explorer(tmp_path / "data.json", "main").read_text())
    results = data["main"]["results"]
    assert results["linear"]["value"] == "bf16" and results["exp"]["value"] == "fp32"
    assert results["linear"]["bgColor"] != results["exp"]["bgColor"]


def test_a_notebook_gets_a_self_contained_fragment(plan: CastPlan) -> None:
    shown = plan._repr_html_()
    assert shown.startswith("<div>") and "<table>" in shown and "<svg" in shown and "<script" not in shown
    assert plan.summary().splitlines()[0].replace("'", "&#x27;") in shown


def test_an_empty_plan_can_be_drawn(tmp_path: Path) -> None:
    empty = CastPlan("bf16", ())
    assert empty.listing(fold=True) and empty.to_svg() and empty.to_dot() and empty._repr_html_()
    assert empty.to_html(tmp_path / "empty.html").is_file()


def test_parts_of_a_layout_never_overlap() -> None:
    paths = [("m", str(i // 7)) for i in range(70)] + [()] * 30
    edges = [(i, i + 1) for i in range(99)] + [(i, min(i + 9, 99)) for i in range(0, 90, 5)]
    found = nest(paths, edges)
    opened = {box.id for box in found.boxes}
    sizes = dict.fromkeys(range(100), (100.0, 40.0)) | {box.id: (150.0, 50.0) for box in found.boxes}
    placed = place(found, sizes, opened)
    assert set(range(100)) <= placed.rects.keys()
    for box in found.boxes:
        outer = placed.rects[box.id]
        inner = [placed.rects[part] for part in box.parts]
        for index, a in enumerate(inner):
            assert outer.x <= a.x and a.x + a.w <= outer.x + outer.w + 0.01 and outer.y < a.y and a.y + a.h <= outer.y + outer.h + 0.01
            for b in inner[index + 1 :]:
                assert a.x + a.w <= b.x + 0.01 or b.x + b.w <= a.x + 0.01 or a.y + a.h <= b.y + 0.01 or b.y + b.h <= a.y + 0.01


def test_counts_in_few_characters() -> None:
    sizes = {0: "0 B", 999: "999 B", 999.7: "1 kB", 999_960: "1 MB", 1234: "1.23 kB", 5_600_000: "5.6 MB", 7.8e9: "7.8 GB", 1e13: "10 TB"}
    assert [amount(n, "B") for n in sizes] == [*sizes.values()]


def test_heavy_and_cast_kinds(plan: CastPlan) -> None:
    assert by_impact(plan) == []
    assert sum(casts_by_kind(plan.casts).values()) == len(plan.casts)


def test_model_explorer_data_of_an_onnx_file_has_the_names_of_its_nodes(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (4, 4)) for name in "xy")
    nodes = [onnx.helper.make_node("MatMul", [given, "w"], [made], f"/{made}/MatMul") for given, made in ("xh", "hy")]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], [weight]), ir_version=9)
    plan = amprewrite.rewrite_onnx(model, dtype="fp16").plan
    data = json.loads(plan.to_model_explorer(tmp_path / "data.json").read_text())
    assert {"/h/MatMul", "/y/MatMul"} <= data["main"]["results"].keys()
