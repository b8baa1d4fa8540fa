"""A few hundred generated cases on every run of the tests: fixed seeds, no finding. `make fuzz MINUTES=60` runs more."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import long_beyond
from torch import nn
from torch._higher_order_ops import map as hop_map
from torch._higher_order_ops import scan

import amprewrite
from tests.fuzz import __main__ as fuzz
from tests.fuzz import program_case, states, vocabulary
from tests.fuzz.findings import foreign
from tests.fuzz.kinds import KINDS
from tests.fuzz.modes import HeavyOps, Moved, Rounded, Scattered, ToldHooks
from tests.fuzz.mutants import MUTANTS, Mutant, prove
from tests.fuzz.open_findings import OPEN
from tests.fuzz.oracle import Problem, Record, compare, start_clean, thread_modes, untold
from tests.fuzz.program_case import run
from tests.fuzz.programs import Program, generate, initialised, smaller
from tests.fuzz.proofs import PROOFS
from tests.fuzz.shrink import shrink
from tests.fuzz.states import Sequence, Trial, WrongError, check

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Generated programs warn and log as they like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def found(kind: str, seeds: range) -> list[str]:
    """The findings among the cases of some seeds, each with the command that shows it."""
    result = []
    for seed in seeds:
        case = KINDS[kind].generate(seed)
        problem = None if case is None else KINDS[kind].check(case)
        if problem is not None and not foreign(problem.kind):
            result.append(f"python -m tests.fuzz --show {kind}:{seed}: {problem.kind} · {problem.where}: {problem.text}")
    return result


@pytest.mark.parametrize("start", long_beyond(1, [40, 4, 22]))
def test_programs_agree_with_fp32(start: int) -> None:
    assert found("programs", range(start, start + 18)) == []


@pytest.mark.parametrize("start", range(0, 10, 5))
def test_sequences_on_one_model_never_use_old_state(start: int) -> None:
    assert found("states", range(start, start + 5)) == []


@pytest.mark.long
def test_sets_of_options_work_or_are_refused() -> None:
    assert found("options", range(80)) == []


def test_files_are_rewritten_or_refused() -> None:
    assert found("files", range(100)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "start"), [(kind, start) for kind in KINDS for start in range(1000, 1400, 50)])
def test_many_more(kind: str, start: int) -> None:
    assert found(kind, range(start, start + 50)) == []


# the fuzzer itself ----------------------------------------------------------------------------------------------------


def test_a_seed_makes_one_case() -> None:
    for kind in KINDS.values():
        assert kind.generate(11) == kind.generate(11)


def test_programs_are_made_of_more_than_150_ops() -> None:
    assert len({template.tag for templates in vocabulary.THEMES.values() for template in templates}) >= 150


def test_about_one_program_in_eight_is_long_or_wide_and_counts() -> None:
    made = [each for each in map(generate, range(200)) if each is not None]
    long = [each for each in made if max(size for given in each.inputs for size in given.shape) >= 255]
    assert len(made) / 12 < len(long) < len(made) / 6
    assert sum(any(tag.startswith("count") for tag in each.tags()) for each in long) > len(long) / 2


def test_whole_numbers_and_what_is_made_of_them_are_not_rounded() -> None:
    """Positions, counts and angles are exact until they meet other numbers; what is written into such a tensor is another number."""
    for mode in (Rounded(torch.bfloat16), Scattered(torch.bfloat16, 3)):
        data = torch.full((300,), 0.1) + 0
        with mode:
            places = torch.arange(300).float()
            angles = torch.outer(places, 100.0 ** (-torch.arange(4) / 4)).cos()
            counts = (data > 0).float().cumsum(0)
            kept = torch.zeros(300)
            kept[:] = data
            met, written = places * data, kept * 1
        assert places[-1] == 299 and counts[-1] == 300 and not torch.equal(angles.to(torch.bfloat16).float(), angles)
        for each in (met, written):
            assert torch.equal(each.to(torch.bfloat16).float(), each)


def test_a_difference_is_seen() -> None:
    want, got = Record(), Record()
    want.keep("0 result 0", torch.ones(3))
    got.keep("0 result 0", torch.ones(3) * 1.5)
    problem = compare(want, got, None, None, True, "bf16")
    assert problem is not None
    assert problem.kind == "wrong"


def test_what_no_low_run_holds_is_no_fault_of_the_graph() -> None:
    """Without autocast the rounded run says what is finite, and the one with the scale of the program what stays so."""
    want, inside, beyond = Record(), Record(), Record()
    for record, value in ((want, 7e4), (inside, 6e4), (beyond, torch.inf)):
        record.keep("0 gradient w", torch.tensor([1.0, value]))
    problem = compare(want, beyond, None, inside, False, "fp16")
    assert problem is not None
    assert problem.kind == "not finite"
    assert compare(want, beyond, None, beyond, False, "fp16") is None
    assert compare(want, beyond, inside, inside, False, "fp16", [beyond]) is None


def test_a_program_is_exact_only_where_its_rounded_run_is_the_same_run() -> None:
    """A hook that clamps gives another gradient at another scale, and then says nothing of roundings."""
    want, got, other = Record(), Record(), Record()
    for record, value in ((want, 881.25), (got, 881.0), (other, 31.75)):
        record.keep("0 gradient weight", torch.full((4,), value))
    assert compare(want, got, None, other, True, "fp16") is None
    problem = compare(want, got, None, want, True, "fp16")
    assert problem and problem.kind == "wrong"


def test_what_fp32_leaves_of_terms_that_cancel_is_no_fault() -> None:
    """As small a gradient beside small ones is one."""
    kinds = []
    for beside in (8.0, 1e-3):
        want, got = Record(), Record()
        for record, left in ((want, 3e-6), (got, 0.0)):
            record.keep("0 gradient bias", torch.full((4,), beside))
            record.keep("0 gradient weight", torch.full((1,), left))
        problem = compare(want, got, None, None, False, "fp16")
        kinds.append(problem and problem.kind)
    assert kinds == [None, "inexact"]


def test_what_a_saturated_op_leaves_is_no_fault() -> None:
    """What another op leaves where fp32 gives none is."""
    kinds = []
    for left in (2e-5, 2e-3):
        want, got = Record(), Record()
        for record, value in ((want, 0.0), (got, left)):
            record.keep("0 gradient weight", torch.full((4,), value))
        problem = compare(want, got, None, None, False, "bf16")
        kinds.append(problem and problem.kind)
    assert kinds == [None, "inexact"]


def test_rounding_is_told_from_a_lost_value() -> None:
    """Two roundings decide a tie in two ways; a row that is gone is no rounding, and a draw that overflows excuses nothing."""
    want, other, lost, none = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 2.5]), torch.tensor([1.0, 0.0, 3.0]), torch.inf
    records = {}
    for name, value in (("want", want), ("other", other), ("lost", lost), ("inf", want * none), ("same", want)):
        records[name] = Record()
        records[name].keep("0 result 0", value)
    kinds = []
    for got, draw in (("other", "other"), ("other", "same"), ("lost", "other"), ("lost", "inf")):
        problem = compare(records["want"], records[got], None, None, False, "bf16", (), [records[draw]])
        kinds.append(problem and problem.kind)
    assert kinds == ["rounding", "inexact", "inexact", "inexact"]


def test_gradients_made_of_one_beyond_the_range_have_no_bound_without_a_peer() -> None:
    want, got, inside = Record(), Record(), Record()
    for record, weight, bias in ((want, 1e9, 512.0), (got, torch.inf, torch.nan), (inside, 1e9, 512.0)):
        record.keep("0 gradient a.weight", torch.tensor(weight))
        record.keep("0 gradient a.bias", torch.tensor(bias))
    assert compare(want, got, None, None, False, "fp16") is None
    problem = compare(want, got, inside, inside, False, "fp16")
    assert problem is not None and problem.kind == "not finite"


def test_what_is_wrong_is_told_before_what_is_rounding() -> None:
    want, got, draw = Record(), Record(), Record()
    for record, first, second in ((want, 1.0, 1.0), (got, 1.1, 2.0), (draw, 1.1, 1.0)):
        record.keep("0 result 0", torch.tensor(first))
        record.keep("0 gradient w", torch.tensor(second))
    problem = compare(want, got, None, None, False, "bf16", (), [draw])
    assert problem is not None
    assert (problem.kind, problem.where) == ("inexact", "gradient")


def test_scattered_values_are_neighbours_each_as_often_as_it_is_near() -> None:
    value = torch.full((4000,), 1.0) + torch.arange(4000) * 2**-23
    value = torch.cat([value, 1 + 2**-8 * 0.25 + torch.arange(4000) * 2**-23, torch.tensor([0.0, 1.5, torch.inf, -torch.inf])])
    with Scattered(torch.bfloat16, 3):
        found = torch.stack([value, value]) + 0
    exact = value.to(torch.bfloat16).float() == value
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][exact], value[exact])
    assert set(found[0][:8000].tolist()) == {1.0, 1.0078125}
    assert 0.1 < float((found[0][4000:8000] > 1).float().mean()) < 0.4


def test_numbers_are_rounded_as_a_cpu_rounds_what_its_low_sums_add() -> None:
    low = torch.full((8,), 1000.0, dtype=torch.bfloat16)
    for numbers in (False, True):
        with Rounded(torch.bfloat16, numbers=numbers):
            found = low.float() - 999
        assert (found == (low - 999).float()).all() == numbers


def test_gradients_of_a_scaled_run_come_back_unscaled() -> None:
    program = next(p for p in map(generate, range(50)) if p is not None and "grad" in p.calls and any(each.grad for each in p.inputs))
    plain, scaled = (run(program, initialised(program, plain=True), scale=scale) for scale in (1.0, 1024.0))
    assert compare(plain, scaled, None, None, False, "fp16") is None
    assert any("gradient" in name for name in plain.values)


def test_what_other_roundings_give_is_no_finding() -> None:
    """Saturated layers: the gradient is 1.9 % off, autocast's 0.4 %, and up to 7.9 % if it rounds otherwise."""
    steps = (
        ("make_optimizer", ("Adafactor", "plain", False)), ("train_step", (4, 1, "value", False)), ("write", ("first", "data_assign")),
        ("write", ("first", "data_assign")), ("write", ("second", "set_")), ("call", ("eval", 4)), ("write", ("first", "detach")),
        ("backward", (4, False, False)), ("train_step", (4, 2, "value", True)),
    )  # fmt: skip
    assert check(Sequence(720246, "Stateful", False, (("dtype", "fp16"), ("cache_weights", "step")), steps)) is None


def test_a_weight_that_is_another_is_a_finding_however_it_is_rounded() -> None:
    for net in ("Plain", "Stateful", "Recurrent"):
        start_clean()
        trial = Trial(net, 1, False, {"dtype": "bf16"})
        trial.call("grad", 4)
        trial.backward(4, False, False)
        with torch.no_grad():
            trial.amp.get_submodule("head").weight.mul_(1.5)  # type: ignore[operator, union-attr]
        trial._sync = lambda: None  # type: ignore[method-assign]
        with pytest.raises(WrongError):
            trial.call("grad", 4)
        with pytest.raises(WrongError):
            trial.backward(4, False, False)


@pytest.mark.parametrize("seed", [4040202, 4040211])
def test_a_region_that_an_earlier_case_left_open_is_no_finding_of_the_next(seed: int) -> None:
    """Inside it autocast goes on with its copies of weights, so runs under autocast are no yardstick any more."""
    modes = thread_modes()
    torch.autocast_increment_nesting()
    assert check(states.generate(seed)) is None
    assert thread_modes() == modes


def test_a_mode_that_a_case_leaves_on_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "mode", lambda trial, name: torch.autocast_increment_nesting())
    found = check(Sequence(0, "Plain", False, (("dtype", "bf16"),), (("call", ("no_grad", 4)), ("mode", ("eval",)))))
    assert found is not None and (found.kind, found.where, found.at) == ("leaves on", "autocast", 1)
    start_clean()


def test_an_error_of_an_op_that_torch_compile_meets_alone_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(program: Program) -> nn.Module:
        model = initialised(program)

        def forward(*_: Any) -> None:
            try:
                raise TypeError("no tangent")
            finally:
                raise RuntimeError("left open")  # as torch 2.11 puts its own error over that of an op inside a transform

        model.forward = forward
        return model

    monkeypatch.setattr(program_case, "_compiled", compiled)
    for text, alone in (("TypeError: no tangent", True), ("TypeError: another", False)):
        problem = Problem("raises", "TypeError in first_run.run_node", text)
        found = program_case._ours(generate(3), problem, None, lambda got: None)
        assert found is not None and foreign(found.kind) == alone


def test_a_hook_hides_no_overflow_from_the_oracle() -> None:
    """The library gives a hook NaN for an infinity, so that the step is skipped; a yardstick that clamps it would be finite."""
    found = []
    for mode in (contextlib.nullcontext, ToldHooks):
        x = torch.ones(3, requires_grad=True)
        with mode():
            y = x * 1
            y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        (y.half() * 6e4).sum().mul(2).backward()
        found.append(x.grad.isnan().all().item())  # type: ignore[union-attr]
    assert found == [False, True]


def test_parts_of_composite_ops_are_moved_in_inference_mode_too() -> None:
    layer, x = nn.GRU(4, 4), 9 * torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Moved(torch.bfloat16, 0), torch.autocast("cpu", torch.bfloat16):
            found.append(layer(x)[0].float())
    with torch.no_grad():
        errors = [float((each - layer(x)[0]).norm()) for each in found]
    assert 0.3 < errors[0] / errors[1] < 3


class InBodies(nn.Module):
    """Four products in a scan, four in a map, one in an autograd Function."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x @ w

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return None, None

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        _, scanned = scan(lambda c, t: (c + t, (c + t) @ self.lin.weight), torch.zeros_like(x[0]), x)
        return scanned, hop_map(lambda t: t @ self.lin.weight, x), self.Product.apply(x, self.lin.weight)


def test_products_in_bodies_are_counted() -> None:
    for overrides, dtype in (({}, torch.bfloat16), ({"matmul": "deny"}, torch.float32)):
        amp, ops = amprewrite.rewrite(InBodies(), dtype="bf16", overrides=overrides), HeavyOps()
        with torch.no_grad():
            amp(torch.randn(4, 8))
            with ops:
                amp(torch.randn(4, 8))
        assert ops.ran == {dtype: 9}
        assert untold(amp, ops.ran, []) is None


def test_a_case_past_its_time_is_given_up_also_where_errors_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(case: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(Exception):
                time.sleep(5)

    monkeypatch.setattr(fuzz, "CASE_SECONDS", 1)
    start = time.monotonic()
    found = fuzz.examine(replace(KINDS["states"], check=slow), 0, {})
    assert found is not None and found.signature.startswith("slow") and time.monotonic() - start < 4


def test_shrinking_keeps_what_fails() -> None:
    """A made-up fault, any program with a linear layer in it, is cut down to a program of one statement."""
    program = next(p for p in map(generate, range(50)) if p is not None and "linear" in p.tags() and len(p.body) > 3)

    def check(candidate: object) -> Problem | None:
        return Problem("made up", "linear", "") if "linear" in candidate.tags() else None  # type: ignore[attr-defined]

    small, _ = shrink(program, Problem("made up", "linear", ""), check, smaller, 5.0)
    assert [each.tag for each in small.body] == ["linear"]


def test_mutants_fit_the_code_as_it_is() -> None:
    """A mutant whose text is gone is written anew, in the change that moved it."""
    for mutant in MUTANTS:
        for file, old, new in mutant.edits:
            assert (ROOT / file).read_text().count(old) == 1, f"{mutant.name}: {file}: {old!r}"
            assert old != new
    assert {mutant.name for mutant in MUTANTS} == set(PROOFS)


def test_the_smallest_program_of_each_mutant_is_right() -> None:
    wrong = []
    for name, proof in PROOFS.items():
        start_clean()
        if not proof():
            wrong.append(name)
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_makes_its_smallest_program_wrong(mutant: Mutant) -> None:
    assert prove(mutant) == ""


def test_nothing_else_knows_of_the_fuzzer() -> None:
    """But the command that runs everything."""
    own, everything = Path(__file__).parent, ROOT / "examples" / "benchmarks" / "everything.py"
    for path in [
        *(ROOT / "amprewrite").rglob("*.py"),
        *(ROOT / "passes").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]:
        if own not in path.parents and path != everything:
            assert not re.search(r"\btests\.fuzz\b", path.read_text()), path


def test_every_file_says_what_it_is_for() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
        if path.stem not in ("__main__", "test_fuzz"):
            importlib.import_module(f"tests.fuzz.{path.stem}".removesuffix(".__init__"))


@pytest.mark.slow
@pytest.mark.parametrize("kind, seed", OPEN)
def test_what_is_listed_as_open_is_open(kind: str, seed: int) -> None:
    """Take a finding off the list when it is repaired."""
    command = [sys.executable, "-m", "tests.fuzz", "--bare", f"{kind}:{seed}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode == 1
