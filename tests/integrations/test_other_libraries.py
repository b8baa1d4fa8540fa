"""What the guide on other libraries says of each: the object to rewrite, and numbers beside fp32's, where its package is installed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WIDTH = 64


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason=f"needs the package {package}")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    np.random.seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", amprewrite.AmpRewriteWarning)
        yield
    ours = [str(each.message) for each in said if issubclass(each.category, amprewrite.AmpRewriteWarning)]
    assert not [message for message in ours if "ran in fp32" in message]


def mlp(out: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, out))


def data(rows: int = 128) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(-1)


def low_share(amp: nn.Module) -> float:
    """Share of the FLOPs of matrix products and convolutions that run low."""
    nodes = [node for node in amp.plan.nodes if node.flops]
    return sum(node.flops for node in nodes if node.colour.value == "low") / max(sum(node.flops for node in nodes), 1)


def trains_alike(make: Callable[[], nn.Module], losses: Callable[[nn.Module], list[float]], room: float = 0.02) -> None:
    """Losses of the same training in fp32, bf16 and fp16 agree, and fall."""
    exact = losses(make())
    for dtype in ("bf16", "fp16"):
        amp = amprewrite.rewrite(make(), dtype=dtype)
        got = losses(amp)
        assert np.allclose(got, exact, rtol=room, atol=room), (dtype, got, exact)
        assert low_share(amp) == 1.0
    assert exact[-1] < exact[0]


def steps(model: nn.Module, loss: Callable[[nn.Module], Tensor], optimizer: Any = None, count: int = 6) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        found.append(float(value))
    return found


def test_skorch() -> None:
    """Rewrite the module instance that the net is given."""
    skorch = needs("skorch")
    x, y = data()

    def losses(module: nn.Module) -> list[float]:
        net = skorch.NeuralNetClassifier(
            module, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, lr=1e-2, max_epochs=4, batch_size=64, train_split=None,
            iterator_train__shuffle=False, verbose=0,
        )  # fmt: skip
        net.fit(x.numpy(), y.numpy())
        return list(net.history[:, "train_loss"])

    trains_alike(mlp, losses)


def test_keras() -> None:
    """Rewrite the model before `compile`; shape inference runs as written."""
    os.environ["KERAS_BACKEND"] = "torch"
    keras = needs("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("keras was imported with another backend than torch")
    x, y = data()

    def losses(dtype: str | None) -> list[float]:
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(WIDTH, activation="gelu"), keras.layers.Dense(4)]
        model = keras.Sequential(layers)
        if dtype:
            model = amprewrite.rewrite(model, dtype=dtype)
        model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(x.numpy(), y.numpy(), batch_size=64, epochs=3, verbose=0, shuffle=False)
        if dtype:
            assert low_share(model) == 1.0
        return list(history.history["loss"])

    assert np.allclose(losses("bf16"), losses(None), rtol=0.02)


def test_pytorch_metric_learning() -> None:
    """Rewrite the trunk and the embedder; losses and miners read fp32."""
    needs("pytorch_metric_learning")
    from pytorch_metric_learning import losses, miners

    x, y = data()
    miner, triplet = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

    def loss(model: nn.Module) -> Tensor:
        found = model(x)
        return triplet(found, y, miner(found, y))

    trains_alike(lambda: mlp(8), lambda model: steps(model, loss), room=0.05)


def test_sentence_transformers() -> None:
    """Rewrite the whole SentenceTransformer in place."""
    needs("sentence_transformers")
    transformers = needs("transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
            self.bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, hidden_dropout_prob=0.0, **sizes))

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            given = {name: features[name] for name in ("input_ids", "attention_mask")}
            return features | {"token_embeddings": self.bert(**given).last_hidden_state}

    ids = torch.randint(0, 50, (8, 12))
    model = SentenceTransformer(modules=[Encoder(), Pooling(32)]).eval()

    def embed() -> Tensor:
        with torch.no_grad():
            return model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"]

    exact = embed()
    amprewrite.rewrite(model, dtype="bf16", inplace=True)
    assert 0 < (embed() - exact).norm() < 0.02 * exact.norm() and low_share(model) == 1.0


def test_timm() -> None:
    """Rewrite the model, then make EMA and optimizer of it."""
    needs("timm")
    import timm.optim
    import timm.utils

    x, y = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 3])

    def losses(model: nn.Module) -> list[float]:
        ema = timm.utils.ModelEmaV3(model, decay=0.9)
        optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
        found = steps(model, lambda model: F.cross_entropy(model(x), y), optimizer, 3)
        ema.update(model)
        assert all(each.isfinite().all() for each in ema.module.parameters())
        return found

    def make() -> nn.Module:
        torch.manual_seed(0)
        return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=4)

    trains_alike(make, losses, room=0.05)


def test_torch_geometric() -> None:
    """Rewrite the network; indices of edges are no numbers to round."""
    needs("torch_geometric")
    from torch_geometric.nn import GCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(16, WIDTH), GCNConv(WIDTH, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.second(self.first(x, edges).relu(), edges)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net()

    x, y = data()
    edges = torch.randint(0, 128, (2, 512), generator=torch.Generator().manual_seed(2))
    trains_alike(make, lambda model: steps(model, lambda model: F.cross_entropy(model(x, edges), y)))


def test_gpytorch() -> None:
    """Rewrite the network of a deep kernel; the Gaussian process stays as it is."""
    gpytorch = needs("gpytorch")
    x, _ = data(64)
    y = x[:, 0].sin()

    class Deep(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
        def __init__(self, likelihood: Any, net: nn.Module) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.net = net

        def forward(self, given: Tensor) -> Any:
            found = self.net(given)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(found), self.covar_module(found))

    def losses(net: nn.Module) -> list[float]:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Deep(likelihood, net).train()
        marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        return steps(model, lambda model: -marginal(model(x), y))

    exact, net = losses(mlp(2)), amprewrite.rewrite(mlp(2), dtype="bf16")
    assert np.allclose(losses(net), exact, rtol=0.02, atol=0.02) and low_share(net) == 1.0


def test_e3nn() -> None:
    """Rewrite the network that holds the equivariant layers."""
    needs("e3nn")
    from e3nn import o3

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(o3.Linear("16x0e", "8x0e + 4x1o"), o3.Linear("8x0e + 4x1o", "4x0e"))

    x, y = data()
    exact = steps(make(), lambda model: F.cross_entropy(model(x), y))
    got = steps(amprewrite.rewrite(make(), dtype="bf16"), lambda model: F.cross_entropy(model(x), y))
    assert np.allclose(got, exact, rtol=0.02, atol=0.02)


def test_torchmetrics() -> None:
    """Rewrite the network; update metrics outside of it, where they read fp32."""
    torchmetrics = needs("torchmetrics")
    x, y = data()
    model = mlp()
    found = []
    for net in (model, amprewrite.rewrite(model, dtype="bf16")):
        metric = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        metric.update(net(x), y)
        found.append(float(metric.compute()))
    assert abs(found[0] - found[1]) < 0.05


def test_x_transformers() -> None:
    """Rewrite the wrapper that computes the loss."""
    needs("x_transformers")
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    def make() -> nn.Module:
        torch.manual_seed(0)
        return AutoregressiveWrapper(TransformerWrapper(num_tokens=32, max_seq_len=64, attn_layers=Decoder(dim=32, depth=1, heads=2)))

    ids = torch.randint(0, 32, (4, 33), generator=torch.Generator().manual_seed(1))
    trains_alike(make, lambda model: steps(model, lambda model: model(ids), count=4), room=0.05)


def test_stable_baselines3() -> None:
    """Rewrite the policy in place, once the algorithm has made it."""
    stable = needs("stable_baselines3")
    needs("gymnasium")

    def trained(low: bool) -> float:
        model = stable.PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu")
        if low:
            amprewrite.rewrite(model.policy, dtype="bf16", inplace=True)
        model.learn(128)
        return sum(float(each.detach().abs().sum()) for each in model.policy.parameters())

    exact, got = trained(False), trained(True)
    assert abs(got - exact) < 1e-2 * exact


def test_schedulefree() -> None:
    """Nothing to do: its optimizers are torch optimizers."""
    needs("schedulefree")
    from schedulefree import AdamWScheduleFree

    x, y = data()

    def losses(model: nn.Module) -> list[float]:
        optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2)
        optimizer.train()
        return steps(model, lambda model: F.cross_entropy(model(x), y), optimizer)

    trains_alike(mlp, losses)


def test_accelerate() -> None:
    """`mixed_precision="no"`, and the rewritten model to `prepare`."""
    needs("accelerate")
    from accelerate import Accelerator

    x, y = data()

    def losses(model: nn.Module) -> list[float]:
        accelerator = Accelerator(mixed_precision="no", cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return steps(model, lambda model: F.cross_entropy(model(x), y), optimizer)

    trains_alike(mlp, losses)
