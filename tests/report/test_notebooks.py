"""In a notebook reports are tables, and long work counts on: without ipywidgets, and with names shown as they are."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.runtime.training.loss_scale_state import LossScaleReport


class Whole(HTMLParser):
    """Fails on tags that do not close in order; gathers cells and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)
        self.cells += tag == "td"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(report: Any) -> Whole:
    page = Whole()
    page.feed(report._repr_html_())
    assert not page.open
    return page


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def batches() -> list[torch.Tensor]:
    return [torch.randn(8, 64) for _ in range(3)]


def test_verify_is_a_table() -> None:
    report = amprewrite.verify(amprewrite.rewrite(net(), dtype="bf16"), (batches()[0],))
    page = shown(report)
    assert page.cells == 7 * min(len(report._telling()), 20) > 0
    assert f"output error {report.output_error:.2e}" in page.text and "linear" in page.text


def test_a_calibration_is_a_table() -> None:
    page = shown(amprewrite.calibrate(net(), batches()))
    assert page.cells % 6 == 0 and "P(overflow) a pass" in page.text and "gelu" in page.text


def test_a_loss_scale_report_is_its_lines() -> None:
    report = LossScaleReport("dynamic", 65536.0, 12, 1, 0, 3, False, "<b>head</b>[0]:x:")
    assert "1 of 12 steps skipped" in shown(report).text and "<b>head</b>[0]:x:" in shown(report).text


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A notebook without ipywidgets: what its cell shows, one after the other."""
    lines: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            lines.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        lines.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for name, content in (("IPython", {}), ("IPython.display", {"display": display})):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return lines


@pytest.mark.parametrize(
    ("work", "last"),
    [
        (lambda: amprewrite.calibrate(net(), batches()), "calibrating: 3 of 3"),
        (lambda: amprewrite.sensitivity(net(), batches()), "batches weighed: 3 of 3"),
        (lambda: amprewrite.rewrite(net(), dtype="bf16", tolerance=1e-3, calibration=batches()), "plans tried: "),
    ],
    ids=["calibrate", "sensitivity", "tolerance"],
)
def test_long_work_counts_on(notebook: list[str], work: Callable[[], Any], last: str) -> None:
    work()
    assert len(notebook) > 1 and notebook[-1].startswith(last)


def test_nothing_is_shown_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    amprewrite.calibrate(net(), batches())
    assert capfd.readouterr() == ("", "")


def test_a_short_module_path_is_in_the_page_of_verify() -> None:
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(64, 64), act=nn.GELU(), head=nn.Linear(64, 64)))
    assert "linear in fc1" in shown(amprewrite.verify(amprewrite.rewrite(model, dtype="bf16"), (torch.randn(4, 64),))).text
