"""What the guide on other libraries says of each: the object to rewrite, and numbers beside fp32's, where its package is installed."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WIDTH = 64


def needs(package: str) -> Any:
    """The package, or a skip that names what is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"needs the package {error.name or package}")
    except RuntimeError as error:  # a torchvision built for another torch lacks its operators
        pytest.skip(f"{package} does not load here: {str(error).splitlines()[0]}")


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


def test_monai() -> None:
    """Rewrite the network; loss and inferer stay as they are."""
    needs("monai")
    from monai.inferers import SlidingWindowInferer
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    x = torch.randn(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    dice, slide = DiceLoss(sigmoid=True), SlidingWindowInferer((16, 16, 16))

    def losses(model: nn.Module) -> list[float]:
        found = steps(model, lambda model: dice(model(x), (x > 0).float()), count=3)
        with torch.no_grad():
            return [*found, float(dice(slide(torch.cat([x, x], -1), model.eval()), (torch.cat([x, x], -1) > 0).float()))]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16), strides=(2,), num_res_units=1)

    exact, amp = losses(make()), amprewrite.rewrite(make(), dtype="bf16")
    assert np.allclose(losses(amp), exact, rtol=0.02) and low_share(amp) == 1.0


def test_segmentation_models() -> None:
    """Rewrite the network; the loss stays as it is."""
    smp = needs("segmentation_models_pytorch")
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    dice = smp.losses.DiceLoss("binary")

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return steps(model, lambda model: dice(model(x), (x[:, :1] > 0).float()), optimizer, 2)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1)

    exact, amp = losses(make()), amprewrite.rewrite(make(), dtype="bf16")
    assert np.allclose(losses(amp), exact, rtol=0.05) and low_share(amp) == 1.0


def test_open_clip() -> None:
    """Rewrite the whole model; its methods run low, and the plan shows them."""
    open_clip = needs("open_clip")
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    seeded, contrast = torch.Generator().manual_seed(1), open_clip.ClipLoss()
    images, texts = torch.randn(4, 3, 32, 32, generator=seeded), torch.randint(1, 60, (4, 16), generator=seeded)

    def make() -> nn.Module:
        torch.manual_seed(0)
        vision = CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=16, image_size=32)
        return CLIP(32, vision, CLIPTextCfg(context_length=16, vocab_size=64, width=64, heads=4, layers=2))

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return steps(model, lambda model: contrast(*model(images, texts)), optimizer, 3)

    assert np.allclose(losses(amprewrite.rewrite(make(), dtype="bf16")), losses(make()), rtol=0.05)
    amp = amprewrite.rewrite(make(), dtype="fp16").eval()  # in training it skips a first step, and fp32 does not
    with torch.no_grad():
        amp.encode_image(images)
        amp.encode_text(texts)
    assert any(region.entry.startswith("transformer") for region in amp.plan.regions), [region.entry for region in amp.plan.regions]
    assert low_share(amp) == 1.0


def test_fastai() -> None:
    """In place, and a torch optimizer in fp16: with fastai's own, one warning says that nothing is scaled."""
    needs("fastai.callback.all")
    from fastai.basics import Adam, DataLoaders, Learner, OptimWrapper
    from torch.utils.data import TensorDataset

    x, y = data(256)

    def loss(dtype: str | None, optimizer: Any) -> float:
        model = mlp()
        rows = DataLoaders.from_dsets(TensorDataset(x, y), TensorDataset(x, y), bs=64, device="cpu", num_workers=0)
        learner = Learner(rows, model, loss_func=lambda got, want: 1e-6 * F.cross_entropy(got, want), opt_func=optimizer)
        if dtype:
            amprewrite.rewrite(learner.model, dtype=dtype, inplace=True)
        torch.manual_seed(0)
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(4, 1e-2)
        return float(F.cross_entropy(model(x), y))

    torch_adam = partial(OptimWrapper, opt=torch.optim.Adam, eps=1e-15)
    exact = loss(None, torch_adam)
    assert all(abs(loss(dtype, torch_adam) - exact) < 0.05 * exact for dtype in ("bf16", "fp16"))
    with pytest.warns(amprewrite.AmpRewriteWarning, match="gradients in fp16 are not scaled.*OptimWrapper"):
        loss("fp16", partial(Adam, eps=1e-15))


def test_torchrl() -> None:
    """Rewrite the loss module in place; its target network follows."""
    needs("torchrl")
    from tensordict import TensorDict
    from torchrl.data import OneHot
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    x, y = data(32)
    rest = {"observation": x.flip(0), "reward": x[:, :1], "done": torch.zeros(32, 1, dtype=torch.bool)}
    batch = {"observation": x, "action": F.one_hot(y, 4), "next": rest | {"terminated": rest["done"]}}

    def losses(dtype: str | None) -> list[float]:
        actor = QValueActor(mlp(), in_keys=["observation"], spec=OneHot(4))
        loss = DQNLoss(actor, action_space="one_hot", delay_value=True)
        loss.make_value_estimator(gamma=0.9)
        target = SoftUpdate(loss, eps=0.9)
        if dtype:
            amprewrite.rewrite(loss, dtype=dtype, inplace=True)
        optimizer, found = torch.optim.Adam(loss.parameters(), 1e-2), []
        for _ in range(4):
            found += steps(loss, lambda loss: loss(TensorDict(batch, [32]).clone())["loss"], optimizer, 1)
            target.step()
        if dtype:
            assert low_share(loss) == 1.0
        return found

    exact = losses(None)
    assert all(np.allclose(losses(dtype), exact, rtol=0.02) for dtype in ("bf16", "fp16"))


@pytest.mark.parametrize("first", [True, False])
def test_opacus(first: bool) -> None:
    """Rewrite the network before `make_private`; the module that it gives may be rewritten in place, too."""
    needs("opacus")
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    def losses(dtype: str | None) -> list[float]:
        model = amprewrite.rewrite(mlp(), dtype=dtype) if dtype and first else mlp()
        optimizer, rows = torch.optim.SGD(model.parameters(), 0.5), DataLoader(TensorDataset(*data()), batch_size=64)
        model, optimizer, rows = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=rows, noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False
        )
        if dtype and not first:
            amprewrite.rewrite(model, dtype=dtype, inplace=True)
        return [each for x, y in rows for each in steps(model, lambda model, x=x, y=y: F.cross_entropy(model(x), y), optimizer, 1)]

    exact = losses(None)
    assert all(np.allclose(losses(dtype), exact, rtol=0.02) for dtype in ("bf16", "fp16"))


def test_ray_train(tmp_path: Path) -> None:
    """Rewrite the network in the loop of a worker, before `prepare_model`."""
    ray = needs("ray")
    train = needs("ray.train.torch")
    from ray.train import RunConfig, ScalingConfig

    def loop(settings: dict[str, Any]) -> None:
        from ray.train.torch import prepare_model

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        model = prepare_model(amprewrite.rewrite(model, dtype=settings["dtype"]) if settings["dtype"] else model)
        optimizer, x = torch.optim.AdamW(model.parameters(), 1e-2), torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), x[:, :4].argmax(-1))
            loss.backward()
            optimizer.step()
        Path(settings["loss"]).write_text(str(float(loss)))  # a result has metrics only beside a checkpoint

    def loss(dtype: str | None) -> float:
        settings = {"scaling_config": ScalingConfig(num_workers=1), "run_config": RunConfig(storage_path=str(tmp_path))}
        train.TorchTrainer(loop, train_loop_config={"dtype": dtype, "loss": str(tmp_path / "loss")}, **settings).fit()
        return float((tmp_path / "loss").read_text())

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    try:
        exact = loss(None)
        assert all(abs(loss(dtype) - exact) < 0.02 * exact for dtype in ("bf16", "fp16"))
    finally:
        ray.shutdown()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(32, 32), nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 32)
        self.checkpointed = checkpointed

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


@pytest.mark.parametrize("order", ["checkpoints", "compiled before", "compiled after"])
def test_recipes_of_torchtune(order: str) -> None:
    """Rewrite the model; blocks are checkpointed, or compiled before or after. The recipe's loop is written out: no package is needed."""
    words = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(1))

    def norms(dtype: str | None) -> list[float]:
        torch.manual_seed(0)
        model: nn.Module = Decoder(order == "checkpoints")
        compiled = [*model.blocks] if "compiled" in order else []
        for block in compiled if "before" in order else ():
            block.compile(backend="eager")
        model = amprewrite.rewrite(model, dtype=dtype) if dtype else model
        for block in model.blocks if "after" in order else ():
            block.compile(backend="eager")
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(3):
            optimizer.zero_grad()
            for part in words.chunk(2):
                (F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / 2).backward()
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
        return found

    exact = norms(None)
    assert all(np.allclose(norms(dtype), exact, rtol=0.02) for dtype in ("bf16", "fp16"))
