"""lists="autocast": op by op, as torch.autocast colours at run time."""

from __future__ import annotations

import pytest
from chains import decided, letters

from amprewrite.tables.vocabulary import Reason


@pytest.mark.parametrize(
    "text, colours",
    [
        pytest.param("matmul relu", "L L", id="an op on no list follows its low input"),
        pytest.param("relu matmul relu", "H L L", id="an op before the first matmul follows the fp32 input"),
        pytest.param("matmul exp relu matmul", "L H H L", id="an op after a high one is high, even before a matmul"),
        pytest.param("matmul layer_norm gelu matmul", "L H H L", id="a norm is high and its activation follows it"),
        pytest.param("matmul softmax", "L H", id="softmax is high"),
        pytest.param("m=matmul add(m,y)", "L H", id="a sum with an fp32 tensor is high"),
        pytest.param("m=matmul add(y,m)", "L H", id="in either order"),
        pytest.param("m=matmul n=matmul(y) add(m,n)", "L L L", id="a sum of two low ones is low"),
        pytest.param("m=matmul mul(m,k:scalar)", "L L", id="a 0-dim operand does not promote a tensor"),
        pytest.param("m=matmul mul(k:scalar,m)", "L L", id="in either order, too"),
        pytest.param("mul(x:scalar,y:scalar)", "H", id="two 0-dim operands count"),
        pytest.param("m=matmul c=cat(m,y)", "L H", id="cat takes the widest"),
        pytest.param("rand() matmul", "H L", id="an op that reads nothing stays as it is"),
        pytest.param("matmul argmax:int64(matmul) relu", "L . H", id="an op without fp32 operands stays high"),
    ],
)
def test_colours(text: str, colours: str) -> None:
    assert letters(decided(text, "autocast", device="cuda")) == colours


def test_ties_are_mended_last_and_high_wins() -> None:
    assert letters(decided("m=matmul a=relu{t}(m) b=relu{t}(y)", "autocast", device="cuda")) == "L H H"


@pytest.mark.parametrize(
    "text, on_cpu, on_cuda",
    [
        pytest.param("matmul softmax", "L L", "L H", id="softmax follows its input on the CPU"),
        pytest.param("matmul exp", "L L", "L H", id="exp follows its input on the CPU"),
        pytest.param("matmul mse_loss", "L H", "L H", id="losses are high everywhere"),
        pytest.param("prelu", "L", "L", id="prelu is low everywhere"),
    ],
)
def test_the_lists_are_the_devices(text: str, on_cpu: str, on_cuda: str) -> None:
    assert letters(decided(text, "autocast", device="cpu")) == on_cpu
    assert letters(decided(text, "autocast", device="cuda")) == on_cuda


def test_the_reason_names_the_operand_that_decided() -> None:
    case = decided("m=matmul a=add(m,y) relu(m)", "autocast", device="cuda")
    assert (case.paints["a"].reason, case.paints["a"].because_of) == (Reason.WIDEST_INPUT, "y")
    assert (case.paints["relu"].reason, case.paints["relu"].because_of) == (Reason.FOLLOWS_INPUTS, "m")


def test_denied_ops_do_not_spread() -> None:
    """No look-ahead: only dtypes that arrive count, so an op behind a denied one's integers is free."""
    assert letters(decided("e=exp(x) m=matmul(e) gelu(m)", "autocast", device="cuda")) == "H L L"
