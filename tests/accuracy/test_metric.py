"""What an accuracy is measured by: probabilities of the next token, or a function."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amprewrite
from amprewrite.accuracy.frontier import search
from amprewrite.accuracy.strict.metric import LogProb, logits_of, parse_metric
from amprewrite.runtime.options import Options
from amprewrite.tables.formats import FORMATS
from amprewrite.tables.vocabulary import Colour, Reason

BF16 = next(fmt for fmt in FORMATS.values() if fmt.dtype is torch.bfloat16)


class Writer(nn.Module):
    """A deep body of small products, a head, and a large output that no probability depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 32)
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))
        self.head, self.other = nn.Linear(32, 30, bias=False), nn.Linear(32, 30)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(ids)
        for part in self.body:
            x = x + part(x)
        return {"logits": 6 * self.head(x), "other": 100 * self.other(x)}


def writer() -> Writer:
    torch.manual_seed(0)
    return Writer().eval()


BATCHES = [torch.randint(0, 30, (4, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def kl(exact: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    p, q = (each["logits"].double().log_softmax(-1) for each in (exact, got))
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean().item()


def searched(model: nn.Module, tolerance: float, **options: object) -> amprewrite.CastPlan:
    with torch.no_grad():
        return amprewrite.plan(model, (BATCHES[0],), dtype="bf16", calibration=BATCHES, tolerance=tolerance, **options)


def test_the_divergence_is_that_of_the_softmaxes() -> None:
    torch.manual_seed(0)
    exact = {"logits": 3 * torch.randn(5, 7, 11)}
    got = {"logits": exact["logits"] + 0.1 * torch.randn(5, 7, 11)}
    assert LogProb().error(exact, got) == pytest.approx(kl(exact, got))
    assert LogProb().error(exact, exact) == 0
    assert LogProb().error(exact, {"logits": torch.full((5, 7, 11), math.nan)}) == math.inf
    assert LogProb().error(exact, {"logits": torch.ones(5, 7, 10)}) == math.inf


def test_draws_have_the_covariance_of_fishers_information() -> None:
    torch.manual_seed(0)
    logits, generator = torch.randn(1, 6).double(), torch.Generator().manual_seed(0)
    draws = torch.cat([LogProb().draw(logits, generator) for _ in range(20_000)])
    p = logits.softmax(-1)[0]
    torch.testing.assert_close(draws.T @ draws / len(draws), p.diag() - p[:, None] * p, atol=5e-3, rtol=0)


def test_sensitivities_add_up_to_the_divergence_and_leave_other_outputs_out() -> None:
    found = amprewrite.sensitivity(writer(), BATCHES, metric="logprob")
    assert found.unit == "KL divergence, nats" and found.unit in str(found)
    assert not [cause for cause in found.causes if cause.module == "other"]
    assert [cause for cause in amprewrite.sensitivity(writer(), BATCHES).causes if cause.module == "other"]
    with torch.no_grad():
        everything = search(writer(), BATCHES, Options(BF16), accuracy="autocast", metric="logprob").candidates[0].error
    assert everything / 4 < sum(cause.result for cause in found.causes) < 8 * everything


def test_half_of_the_divergence_is_found_by_raising_the_head() -> None:
    with torch.no_grad():
        default = search(writer(), BATCHES, Options(BF16), tolerance=0.9, metric="logprob").chosen.error
    plan = searched(writer(), default / 2, metric="logprob")
    (head,) = [node for node in plan.nodes if node.module == "head"]
    assert (head.colour, head.reason) == (Colour.HIGH, Reason.SENSITIVE)
    flops = {colour: sum(node.flops for node in plan.nodes if node.colour is colour) for colour in Colour}
    assert flops[Colour.HIGH] <= 0.1 * sum(flops.values())
    assert any("strict error (KL divergence, nats)" in note for note in plan.notes)


def test_a_function_of_both_outputs_judges() -> None:
    seen: list[tuple[float, float]] = []

    def largest(exact: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
        error = float((exact["logits"] - got["logits"]).abs().max())
        seen.append((error, kl(exact, got)))
        return error

    found = searched(writer(), 3.0, metric=largest)
    assert seen and max(error for error, _ in seen) > 0
    assert any("strict error (by the function given)" in note for note in found.notes)
    kept = [node for node in searched(writer(), 0.05, metric=largest).nodes if node.reason is Reason.SENSITIVE]
    assert kept and all(node.detail.endswith("(relative L2)") or "neighbours" in node.detail for node in kept)
    assert amprewrite.sensitivity(writer(), BATCHES, metric=largest) == amprewrite.sensitivity(writer(), BATCHES)


@pytest.mark.parametrize("metric", ["l2", "logprob", lambda exact, got: 0.0], ids=["l2", "logprob", "function"])
def test_a_metric_that_nothing_asks_for_is_refused(metric: object) -> None:
    said = "metric= defines the error for tolerance= and accuracy=, and neither is given: pass one"
    with pytest.raises(amprewrite.PolicyError, match=said):
        amprewrite.rewrite(writer(), metric=metric)


@pytest.mark.parametrize("metric", ["kl", 3, dict], ids=["word", "number", "class"])
def test_other_metrics_are_refused(metric: object) -> None:
    with pytest.raises(amprewrite.PolicyError, match=r"metric=.* is not understood"):
        parse_metric(metric)
    with pytest.raises(amprewrite.PolicyError, match=r"metric=.* is not understood"):
        amprewrite.rewrite(writer(), metric=metric)


def test_a_function_must_give_a_size() -> None:
    for function, said in ((lambda exact, got: "much", "must give a number"), (lambda exact, got: -1.0, "is not negative")):
        with pytest.raises(amprewrite.PolicyError, match=said):
            searched(writer(), 0.5, metric=function)


def test_an_output_without_logits_is_refused() -> None:
    with pytest.raises(amprewrite.PolicyError, match="finds no logits in the model's output, a int"):
        logits_of(3)
    assert logits_of((torch.tensor(3.0), torch.ones(2, 3))).shape == (2, 3)
