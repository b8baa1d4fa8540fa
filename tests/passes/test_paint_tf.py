"""lists="tf": TensorFlow's rules, and the scenarios of its own tests that a graph without gradients can express.

Colours and cast counts are those that auto_mixed_precision_test.cc expects; where TensorFlow keeps a fetched node in fp32,
the text says `!` or ends before it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from chains import decided, letters

from amprewrite.tables.formats import FP16
from amprewrite.tables.ops.op_lists import op_lists
from amprewrite.tables.vocabulary import Reason

SIMPLE = "exp relu sqrt relu matmul relu log relu sparse_mm relu"
INFER_AS_DENY = {"sqrt": "deny", "log": "deny"}
OLD = replace(op_lists("tf", FP16, "cuda"), infer_after_allow=False)

SCENARIOS = [
    pytest.param("exp relu sqrt relu", {}, "H H H H", 0, id="1 without an allowed op nothing changes"),
    pytest.param("to:fp16 matmul:fp16 relu:fp16 to(relu) relu", {}, ". . . H H", 0, id="2 what is fp16 already is left alone"),
    pytest.param(SIMPLE, {}, "H H H L L L H H H H", 2, id="3 only the matmul and the relus beside it"),
    pytest.param(
        "exp relu sqrt relu matmul relu log relu matmul relu sqrt relu",
        {"overrides": INFER_AS_DENY},
        "H H H L L L H L L L H H",
        4,
        id="4 infer ops told to be denied split two matmuls",
    ),
    pytest.param(
        "a=relu(x) b=relu(x) m=matmul(a,a) c=cat(a,b) argmax:int64(c) d=relu(b) output(m,d)",
        {},
        "L L L L . L",
        3,
        id="5 low reaches a sibling through a clear op that reads both",
    ),
    pytest.param("relu matmul tanh matmul!", {}, "L L L H", 2, id="7 a kept matmul, the tanh before it low (2025)"),
    pytest.param("relu matmul tanh matmul!", {"lists": OLD}, "L L H H", 2, id="7 a kept matmul, the tanh before it high (2021)"),
    pytest.param(
        "c=conv2d(x,w) b=batch_norm(c,w1,w2) a=add(b,c) conv2d(a,w)", {}, "L L L L", 3, id="9 batch norm low, its statistics fp32"
    ),
    pytest.param(
        "m=matmul a=clone{i}(m) b=clone{i}(m) c=clone{i}(m) s=add(a,b) t=add(s,c) matmul(t)",
        {},
        "L L L L L L L",
        2,
        id="10 every output of a list op",
    ),
    pytest.param("bmm", {}, "L", 2, id="18 batched matmul"),
    pytest.param("c=conv2d(x,w1) a=add(c,w2) relu(a)", {}, "L L L", 4, id="40 bias and relu after a convolution"),
    pytest.param("pow(x) add(pow,w2) relu", {}, "H H H", 0, id="41 bias and relu after a denied op"),
]


@pytest.mark.parametrize("text, options, colours, casts", SCENARIOS)
def test_tensorflows_scenarios(text: str, options: dict[str, object], colours: str, casts: int) -> None:
    case = decided(text, **{"low": "fp16", "device": "cuda", **options})  # type: ignore[arg-type]
    assert (letters(case), len(case.casts)) == (colours, casts)


@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "op",
    [
        "elu",
        "erf",
        "erfc",
        "reciprocal",
        "log",
        "log1p",
        "log_softmax",
        "sigmoid",
        "tanh",
        "softmax",
        "softplus",
        "sqrt",
        "leaky_relu",
        "selu",
        "softsign",
        "prod",
    ],
)
def test_an_infer_op_between_two_matmuls_is_low(op: str, low: str) -> None:
    """Scenarios 19 to 31; four more infer ops beside them."""
    case = decided(f"matmul {op} matmul", low=low, device="cuda")
    assert (letters(case), len(case.casts)) == ("L L L", 2)


@pytest.mark.parametrize(
    "text, colours",
    [
        pytest.param("exp tanh relu tanh relu matmul tanh", "H H H H L L L", id="deny stops where only clear ops lead on"),
        pytest.param("matmul relu relu matmul", "L L L L", id="clear ops between two matmuls are low"),
        pytest.param("matmul relu sqrt relu matmul", "L L L L L", id="a mixed path between two matmuls is low"),
        pytest.param("matmul exp matmul", "L H L", id="a denied op between two matmuls is high"),
        pytest.param("matmul exp sqrt matmul", "L H H L", id="infer behind a denied op is high even before a matmul"),
        pytest.param("matmul cumsum sqrt matmul", "L H H L", id="an unlisted op is a wall"),
        pytest.param("tanh matmul", "H L", id="an infer op before the first matmul is high"),
        pytest.param("relu matmul relu", "L L L", id="clear ops on either side of a matmul are low"),
        pytest.param("relu relu relu matmul", "L L L L", id="low flows up through a whole row of clear ops"),
        pytest.param("relu sqrt relu matmul", "H H L L", id="low does not flow up through an infer op"),
        pytest.param("matmul add(matmul,y) add(add,y) add(add_1,y)", "L L L L", id="a row of adds after a matmul, in one go"),
        pytest.param("m=matmul e=exp(m) a=add(m,e) relu(a)", "L H H H", id="deny beats a low operand"),
        pytest.param("m=matmul e=exp(m) tanh(m,e:high)", "L H H", id="after allow, but a denied op feeds it, too"),
        pytest.param("matmul relu:int64 relu(y)", "L . H", id="what carries no fp32 is no path"),
        pytest.param("matmul relu! relu", "L H H", id="a pinned clear op is no path"),
    ],
)
def test_rules(text: str, colours: str) -> None:
    assert letters(decided(text, low="fp16", device="cuda")) == colours


def test_mean_and_sum_are_denied_in_fp16_and_inferred_in_bf16() -> None:
    assert letters(decided("matmul mean matmul", low="fp16")) == "L H L"
    assert letters(decided("matmul mean matmul", low="bf16")) == "L L L"


def test_infer_directly_after_allow_is_a_switch() -> None:
    assert letters(decided("matmul tanh exp", low="fp16")) == "L L H"
    assert letters(decided("matmul tanh exp", OLD, low="fp16")) == "L H H"


@pytest.mark.parametrize(
    "node, reason, cause",
    [
        ("sqrt", Reason.BETWEEN_ALLOW, "matmul_1"),
        ("tanh", Reason.AFTER_ALLOW, "matmul_1"),
        ("relu", Reason.BESIDE_ALLOW, "matmul"),
        ("tanh_1", Reason.NOT_REACHED, ""),
    ],
)
def test_every_rule_leaves_its_reason(node: str, reason: Reason, cause: str) -> None:
    case = decided("relu(x) matmul(relu) sqrt(matmul) matmul(sqrt) tanh(matmul_1) tanh(y)", low="fp16")
    assert (case.paints[node].reason, case.paints[node].because_of) == (reason, cause)
