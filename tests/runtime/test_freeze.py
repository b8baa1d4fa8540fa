"""A frozen model: weights stored as its graphs read them, bitwise the same results, and a clear word to all that wants fp32 back."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_help import MLP, Observer, data, low, mlp
from tiers import long_beyond
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import amprewrite
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight
from amprewrite.tables.errors import AmpRewriteWarning, CaptureError, PlanError, PolicyError

transformers = pytest.importorskip("transformers")
CASTS = ("_to_copy", "_foreach_copy_", "copy_")


class Tied(nn.Module):
    """A head that shares its weight with an embedding, which is read in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.exp(self.table(x)))


class Grown(nn.Module):
    """Reads a weight in fp32, too, if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        y = self.fc(x)
        return y + torch.exp(self.fc.weight).sum() if more else y


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, write: bool = False) -> Tensor:
        if write:
            self.fc.weight.mul_(2)
        return self.fc(x)


def conv() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    return net.to(memory_format=torch.channels_last), data(2, 3, 8, 8)


def lstm() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.LSTM(8, 8, batch_first=True), data(2, 5, 8)


def attention() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), data(2, 5, 16)


def weight_norm() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)), data()


def frozen(made: nn.Module | None = None, x: Tensor | None = None, **options: object) -> nn.Module:
    amp = low((made or mlp()).eval(), **options)
    amp.freeze(data() if x is None else x)
    return amp


def run(amp: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    with torch.no_grad():
        result = amp(*args, **kwargs)
    return [leaf for leaf in tree_leaves(dict(result) if isinstance(result, dict) else result) if isinstance(leaf, Tensor)]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def held(model: nn.Module) -> int:
    """Bytes of the memory that parameters lie in."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}.values())


# -- results, memory and casts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("made", [conv, lstm, attention, weight_norm])
@pytest.mark.long
def test_results_are_bitwise_those_before(made: Callable[[], tuple[nn.Module, Tensor]], dtype: str) -> None:
    model, x = made()
    amp = low(model.eval(), dtype=dtype)
    want = run(amp, x)
    amp.freeze()
    assert any(isinstance(each, FrozenWeight) for each in amp.parameters())
    assert alike(run(amp, x), want)
    assert alike(run(amp, torch.cat([x, x])), run(low(model, dtype=dtype), torch.cat([x, x])))


def bert() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    return transformers.BertModel(transformers.BertConfig(vocab_size=30, max_position_embeddings=16, **sizes)), torch.arange(12).view(2, 6)


def llama() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)), torch.arange(12).view(2, 6)


def vit() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **sizes)), data(2, 3, 32, 32)


@pytest.mark.parametrize("made", [bert, llama, vit])
@pytest.mark.long
def test_transformers_hold_about_half_and_cast_no_weight(made: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, x = made()
    amp = low(model.eval())
    want, before = run(amp, x), held(amp)
    with Observer() as casting:
        run(amp, x)
    amp.freeze()
    del model
    assert alike(run(amp, x), want)
    assert held(amp) <= 0.55 * before
    with Observer() as watch:
        run(amp, x)
    frozen_weights = sum(isinstance(each, FrozenWeight) for each in amp.parameters())
    assert frozen_weights > 0
    assert sum(map(watch.count, CASTS)) == sum(map(casting.count, CASTS)) - frozen_weights  # before, each was cast where it is read
    assert "weights are stored low" in str(amp.plan)


def test_fp32_weights_are_let_go() -> None:
    model = mlp().eval()
    amp = low(model)
    amp.freeze(data())
    gone = weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert gone() is None


def test_original_model_keeps_its_weights() -> None:
    model = mlp().eval()
    weights = dict(model.named_parameters())
    want = model(data())
    frozen(model)
    assert dict(model.named_parameters()).keys() == weights.keys()
    assert all(each is weights[name] and each.requires_grad and type(each) is nn.Parameter for name, each in model.named_parameters())
    assert torch.equal(model(data()), want)


def test_training_the_original_does_not_change_the_frozen_model() -> None:
    """Weights that stay fp32 (the norms'), or are kept in both formats (the table), and statistics of a batch norm are its own."""
    model = nn.Sequential(Tied(), nn.LayerNorm(12), nn.BatchNorm1d(12), nn.Linear(12, 4)).eval()
    ids = torch.arange(12)
    amp = frozen(model, ids)
    before = run(amp, ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()(ids).square().sum().backward()
    optimizer.step()
    assert alike(run(amp, ids), before)


@pytest.mark.long
def test_generate_is_the_same() -> None:
    model, x = llama()
    amp = low(model.eval())
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = amp.generate(x, **settings)
    amp.freeze()
    assert torch.equal(amp.generate(x, **settings), want)


def test_what_is_read_both_ways_keeps_both_and_is_not_cast() -> None:
    amp = low(Tied().eval())
    x = torch.arange(4)
    want = run(amp, x)
    amp.freeze()
    assert alike(run(amp, x), want)
    assert amp.table.weight is amp.head.weight
    assert amp.head.weight.exact
    assert amp.state_dict()["head.weight"].dtype == torch.float32


def test_weights_beyond_fp16_stay_fp32() -> None:
    model = mlp().eval()
    with torch.no_grad():
        model.first.weight[0, 0] = 1e6
    amp, x = low(model, dtype="fp16"), data() * torch.tensor([0.0] + 7 * [1.0])
    want = run(amp, x)
    amp.freeze()
    assert type(amp.first.weight) is nn.Parameter
    assert isinstance(amp.second.weight, FrozenWeight)
    assert alike(run(amp, x), want)


def test_a_graph_that_was_decided_anew_for_an_overflow_counts_as_it_is() -> None:
    model = mlp().eval()
    with torch.no_grad():
        model.first.weight[0, 0] = 1e6
    amp = low(model, dtype="fp16")
    want = run(amp, data())  # keeps high what fp16 does not hold: the second weight, too
    amp.freeze()
    assert alike(run(amp, data()), want)


def test_padded_weights_are_kept_padded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 4)).eval()
    amp = low(model, pad="always")
    want = run(amp, data())
    amp.freeze()
    assert any(each.padded for each in amp.parameters() if isinstance(each, FrozenWeight))
    assert alike(run(amp, data()), want)
    assert amp.state_dict()["0.weight"].shape == (13, 8)


@pytest.mark.parametrize(("dtype", "pad", "grad"), [("fp16", "never", True), ("bf16", "always", False)])
def test_fp32_reads_that_pad_or_unscale_count(dtype: str, pad: str, grad: bool) -> None:
    """An embedding reads the head's weight in fp32: padded, or with a gradient that leaves the loss scale."""

    class Odd(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mid, self.head = nn.Embedding(13, 7), nn.Linear(7, 7), nn.Linear(7, 13, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mid(self.table(x)) + self.table(x)))

    torch.manual_seed(0)
    amp, x = low(Odd().eval(), dtype=dtype, pad=pad), torch.arange(13)
    with torch.set_grad_enabled(grad):
        want = amp(x)
        amp.freeze()
        assert torch.equal(amp(x), want)
    assert isinstance(amp.table.weight, FrozenWeight) and amp.table.weight.exact


@pytest.mark.parametrize("backend", long_beyond(1, ["aot_eager", "inductor"]))
def test_compilers_get_what_is_stored(backend: str) -> None:
    amp = low(mlp().eval(), backend=backend)
    want = run(amp, data())
    amp.freeze()
    assert alike(run(amp, data()), want)


def test_in_place_and_blocks() -> None:
    model = nn.Sequential(nn.Sequential(MLP(), nn.Linear(4, 8)), nn.Sequential(MLP(), nn.Linear(4, 8))).eval()
    want = run(low(model, granularity="blocks"), data())
    amp = low(model, granularity="blocks", inplace=True)
    amp.freeze(data())
    assert amp is model
    assert alike(run(amp, data()), want)
    with pytest.raises(PolicyError, match="restoring it needs its fp32 weights"):
        amprewrite.restore(amp)
    with pytest.warns(AmpRewriteWarning, match="rounded off is lost"):
        amp.unfreeze()
    assert type(amprewrite.restore(amp)) is nn.Sequential


def test_a_part_runs_by_itself() -> None:
    amp = frozen()
    assert alike(run(amp.first, data()), run(low(mlp().eval()).first, data()))


# -- graphs that come later ----------------------------------------------------------------------------------------------


def test_a_later_graph_that_reads_fp32_says_so() -> None:
    torch.manual_seed(0)
    model = Grown().eval()
    amp = frozen(model)
    with pytest.warns(AmpRewriteWarning, match=r"reads fc\.weight in fp32 here, of which freeze\(\) kept low values alone"):
        got = run(amp, data(), True)
    with torch.no_grad():
        model.fc.weight.copy_(model.fc.weight.bfloat16())
    assert alike(got, run(low(model), data(), True))


def test_strict_refuses_it() -> None:
    amp = frozen(Grown(), strict=True)
    with pytest.raises(CaptureError, match="kept low values alone"):
        run(amp, data(), True)


def test_a_graph_that_writes_a_frozen_weight_is_refused() -> None:
    amp = frozen(Writes())
    with pytest.raises(amprewrite.AmpRewriteError, match="frozen weight"):
        run(amp, data(), True)


# -- training ------------------------------------------------------------------------------------------------------------


def test_training_is_refused() -> None:
    amp = frozen()
    assert not any(each.requires_grad for each in amp.parameters())
    assert not amp(data()).requires_grad
    with pytest.raises(PolicyError, match="is frozen: no parameter takes a gradient"):
        amp.train()(data())
    with pytest.raises(PolicyError, match="takes no gradients"):
        amp.requires_grad_()


def test_calls_with_gradients_give_the_same_bits() -> None:
    model = mlp().eval()
    x = data(4, 3, 8).transpose(0, 1)
    want = low(model)(x)
    amp = frozen(model, x)
    assert torch.equal(amp(x), want)
    x = x.clone().requires_grad_()
    y = x.detach().clone().requires_grad_()
    amp(x).sum().backward()
    low(model)(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_what_is_put_on_top_can_be_trained() -> None:
    amp = frozen()
    amp.second = nn.Linear(16, 4)
    amp.train()(data()).sum().backward()
    assert amp.second.weight.grad is not None


def test_freezing_a_model_that_trains_or_was_never_called_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"call amp\.eval\(\) first"):
        low(mlp()).freeze(data())
    with pytest.raises(PlanError, match="call the model first"):
        low(mlp().eval()).freeze()
    with pytest.raises(PolicyError, match="frozen already"):
        frozen().freeze(data())


@pytest.mark.parametrize("options", [{}, {"differentiable": True}], ids=str)
def test_an_optimizer_that_holds_the_weights_is_told(options: dict[str, Any]) -> None:
    amp = low(mlp().eval())
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, **options)
    with pytest.warns(AmpRewriteWarning, match="SGD steps the parameters that freeze"):
        amp.freeze(data())
    del optimizer


# -- writes and reads from outside ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [
    lambda w: w.add_(1), lambda w: w.data.add_(1), lambda w: w.copy_(torch.zeros(16, 8)), lambda w: w.__setitem__(0, 1.0),
    lambda w: torch._foreach_add_([w], 1), lambda w: nn.init.zeros_(w), lambda w: torch.add(w, 1, out=w),
    lambda w: setattr(w, "data", torch.zeros(16, 8)),
], ids=["add_", "data", "copy_", "setitem", "foreach", "init", "out", "new data"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:a frozen weight is read")
def test_writes_are_refused(write: Callable[[Tensor], Any]) -> None:
    amp = frozen()
    want = run(amp, data())
    with pytest.raises(PolicyError, match="frozen weight"), torch.no_grad():
        write(amp.first.weight)
    assert alike(run(amp, data()), want)


def test_reading_a_weight_gives_what_is_stored_and_says_so() -> None:
    model = mlp().eval()
    weight = frozen(model).first.weight
    assert (weight.dtype, weight.shape, weight.element_size()) == (torch.float32, (16, 8), 2)
    with pytest.warns(AmpRewriteWarning, match="read outside of the rewritten graphs"):
        got = weight + 0
    assert torch.equal(got, model.first.weight.bfloat16().float())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(weight.to(torch.bfloat16), model.first.weight.bfloat16())
        repr(weight)


class Scaled(nn.Module):
    """Its forward reads an attribute of its weight, as layers of muP do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.first.weight.width = 4.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x / self.first.weight.width)  # type: ignore[operator]


def test_attributes_of_weights_stay() -> None:
    model, x = Scaled().eval(), data()
    amp = frozen(model)
    want = run(amprewrite.rewrite(model, dtype="bf16"), x)
    for made in (amp, copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))):
        assert isinstance(made.first.weight, FrozenWeight) and alike(run(made, x), want)
    rebuilt, kept = amp.first.weight.__reduce_ex__(2)
    assert torch.equal(rebuilt(*kept[:6]).low(), amp.first.weight.low())  # as in pickles from before the attributes were kept
    amp.unfreeze(model.state_dict())
    assert alike(run(amp, x), want)


# -- fp32 again ----------------------------------------------------------------------------------------------------------


def test_unfreeze_with_a_state_dict_takes_all_back() -> None:
    model = mlp().eval()
    amp = frozen(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.unfreeze(model.state_dict())
    assert all(type(each) is nn.Parameter and each.requires_grad for each in amp.parameters())
    assert all(torch.equal(a, b) for a, b in zip(amp.parameters(), model.parameters(), strict=True))
    amp.train()(data()).sum().backward()
    assert amp.first.weight.grad.dtype == torch.float32


def test_unfreeze_without_says_what_is_lost() -> None:
    model = mlp().eval()
    amp = frozen(model)
    with pytest.warns(AmpRewriteWarning, match="what freeze\\(\\) rounded off is lost"):
        amp.unfreeze()
    assert torch.equal(amp.first.weight, model.first.weight.bfloat16().float())
    with pytest.raises(PlanError, match="is not frozen"):
        amp.unfreeze()


def test_unfreeze_from_half_a_state_dict_changes_nothing() -> None:
    amp = frozen()
    with pytest.raises(PlanError, match=r"has no second\.weight"):
        amp.unfreeze({name: each for name, each in mlp().state_dict().items() if name != "second.weight"})
    assert isinstance(amp.first.weight, FrozenWeight)


def test_frozen_flags_come_back() -> None:
    model = mlp().eval()
    model.first.requires_grad_(False)
    amp = frozen(model)
    amp.unfreeze(model.state_dict())
    assert [each.requires_grad for each in amp.parameters()] == [each.requires_grad for each in model.parameters()]


def test_state_dict_holds_what_is_stored_and_loads() -> None:
    model = mlp().eval()
    amp = frozen(model)
    state = amp.state_dict()
    assert {type(each) for each in state.values()} == {Tensor}
    assert {each.dtype for each in state.values()} == {torch.bfloat16}
    assert amp.first.state_dict()["weight"].dtype == torch.bfloat16
    plain = mlp(seed=3)
    plain.load_state_dict(state)
    assert torch.equal(plain.first.weight, model.first.weight.bfloat16().float())
    other = frozen(mlp(seed=3))
    other.load_state_dict(state)
    assert isinstance(other.first.weight, FrozenWeight)
    assert alike(run(other, data()), run(amp, data()))


def test_a_state_dict_with_weights_of_both_kinds_loads_and_stays_frozen() -> None:
    """A tied table is read in fp32 and low, so it is stored, and loaded, both ways."""

    def tied(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return frozen(nn.Sequential(Tied(), nn.Linear(12, 12)), ids)

    ids = torch.arange(12)
    amp, other = tied(0), tied(1)
    before, state = run(amp, ids), amp.state_dict()
    assert {each.dtype for each in state.values()} == {torch.float32, torch.bfloat16}
    for loaded in (amp, other):
        loaded.load_state_dict(state)
        assert isinstance(loaded[0].table.weight, FrozenWeight) and loaded[0].table.weight.exact
        assert alike(run(loaded, ids), before)
        assert torch.equal(loaded[0].table.weight.low(), state["0.table.weight"].bfloat16())


def test_loading_fp32_unfreezes() -> None:
    amp, other = frozen(), mlp(seed=3).eval()
    amp.load_state_dict(other.state_dict())
    assert all(type(each) is nn.Parameter for each in amp.parameters())
    assert torch.equal(amp.first.weight, other.first.weight)
    assert alike(run(amp, data()), run(low(other), data()))
    assert amp.state_dict()["first.weight"].dtype == torch.float32


def test_loading_half_of_a_state_dict_says_which_weights_stay_rounded() -> None:
    amp, other = frozen(), mlp(seed=3).state_dict()
    with pytest.warns(AmpRewriteWarning, match=r"first\.weight and 2 more weights are fp32 again with the low values"):
        amp.load_state_dict({"second.weight": other["second.weight"]}, strict=False)
    assert torch.equal(amp.second.weight, other["second.weight"])
    amp = frozen()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="Unexpected key"):
            amp.load_state_dict({**other, "third": torch.zeros(1)})


def test_unfreeze_takes_values_of_what_was_not_frozen() -> None:
    def normed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(mlp(seed), nn.LayerNorm(4), nn.BatchNorm1d(4)).eval()
        for each in (model[1].weight, model[1].bias, model[2].running_mean):
            nn.init.normal_(each)
        return model

    amp, other = frozen(normed(0)), normed(3)
    wrong = other.state_dict() | {"1.weight": torch.zeros(5)}
    with pytest.raises(PlanError, match=r"1\.weight is"):
        amp.unfreeze(wrong)
    assert isinstance(amp[0].first.weight, FrozenWeight)
    amp.unfreeze(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(amp.state_dict().values(), other.state_dict().values(), strict=True))


# -- copies, devices, exports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda amp: pickle.loads(pickle.dumps(amp))], ids=["deep", "copy", "pickle"])
def test_copies_are_frozen(copied: Callable[[nn.Module], nn.Module]) -> None:
    amp = frozen()
    twin = copied(amp)
    assert isinstance(twin.first.weight, FrozenWeight)
    assert alike(run(twin, data()), run(amp, data()))
    twin.unfreeze(mlp().state_dict())
    assert twin.first.weight.requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda amp: pickle.loads(pickle.dumps(amp))], ids=["deep", "pickle"])
def test_copies_compute_the_same_bits_though_no_weight_says_that_it_was_trained(copied: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)  # the norm is fp32 for the gradients of its weights
    amp = amprewrite.rewrite(nn.Sequential(nn.Embedding(12, 64), nn.LayerNorm(64), nn.Linear(64, 12)).eval(), dtype="bf16")
    tokens = torch.arange(12).reshape(2, 6)
    amp.freeze(tokens)
    for twin in (copied(amp), copied(copied(amp))):
        assert alike(run(twin, tokens), run(amp, tokens)) and torch.equal(copied(twin)(tokens), amp(tokens))


def test_it_moves_to_another_device_and_format() -> None:
    amp = frozen()
    want = run(amp, data())
    amp.to("cpu").float().eval()
    assert isinstance(amp.first.weight, FrozenWeight)
    assert alike(run(amp, data()), want)
    assert amp.to("meta").first.weight.stored.device.type == "meta"


@pytest.mark.filterwarnings("ignore:.*still in half")
def test_export_gives_what_the_unfrozen_model_exports() -> None:
    model = mlp().eval()
    want = low(model).export_program((data(),))
    got = frozen(model).export_program((data(),))
    assert alike(run(got.module(), data()), run(want.module(), data()))


def test_export_of_a_frozen_model_holds_low_weights(tmp_path: Path) -> None:
    """Half the bytes, no cast of a weight, and the numbers of the model; a table that a head shares is read in fp32, too, and stays."""
    torch.manual_seed(0)
    tied, x = Tied().eval(), torch.arange(8)[None]
    amp = frozen(tied, x)
    assert alike(run(amp.export_program((x,)).module(), x), run(amp, x))
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).eval()
    x = torch.randn(4, 1024)
    want = run(low(model), x)
    for name, amp, dtype in (("fp32", low(model), torch.float32), ("low", frozen(model, x), torch.bfloat16)):
        torch.export.save(amp.export_program((x,)), tmp_path / f"{name}.pt2")
        loaded = torch.export.load(tmp_path / f"{name}.pt2")
        assert alike(run(loaded.module(), x), want)
        assert {name: each.dtype for name, each in loaded.state_dict.items()} == dict.fromkeys(model.state_dict(), dtype)
    assert (tmp_path / "low.pt2").stat().st_size < 0.55 * (tmp_path / "fp32.pt2").stat().st_size
    assert len([node for node in loaded.graph.nodes if "to.dtype" in str(node.target)]) == 2, "the input's and the output's"


def test_verify_rewrite_and_frozen_blocks() -> None:
    amp = frozen()
    assert amprewrite.verify(amp, (data(),)).output_error < 0.05
    with amp.frozen_weights():
        run(amp, data())
    with pytest.raises(PolicyError, match="rewriting it needs its fp32 weights"):
        amprewrite.rewrite(amp, dtype="bf16")


def test_weak_references_of_a_recurrent_layer_lead_to_its_weights() -> None:
    made, x = lstm()
    amp = frozen(made, x)
    for thaw in (False, True):
        if thaw:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                amp.unfreeze()
        for layer in (each for each in amp.modules() if isinstance(each, nn.RNNBase)):
            led = [ref() for ref in layer._flat_weight_refs]
            assert all(one is other for one, other in zip(led, layer._flat_weights, strict=True))
