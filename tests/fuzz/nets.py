"""Small networks for state sequences: batches of 8 numbers in, 4 out, each with a `first`, a `second` and a `head`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Plain(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Residual(Plain):
    """A norm and a sum, so that results are fp32 behind low ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return torch.cumsum(self.head(x), -1)


class Broken(Plain):
    """A graph break, and a write in place to what comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x.add_(self.position)
        out: Tensor = self.head(torch.tanh(self.second(x)))
        return out


class Adapter(Plain):
    """A low-rank adapter that merges into the weight below it, through `.data`, as such libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.merged = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False), False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out = self.second(x)
        if not self.merged:
            out = out + self.up(self.down(x))
        made: Tensor = self.head(torch.tanh(out))
        return made

    def merge(self) -> None:
        self.second.weight.data += (-1.0 if self.merged else 1.0) * (self.up.weight.data @ self.down.weight.data)
        self.merged = not self.merged


class Stateful(Plain):
    """A convolution and a batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.unsqueeze(1))).sum(1)
        out: Tensor = self.head(torch.relu(self.second(torch.tanh(self.first(x)))))
        return out


class Recurrent(Plain):
    """A recurrent layer over pairs of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cell(x.view(x.shape[0], -1, 2))[0][:, -1]
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Copying(Plain):
    """An LSTM over pairs of numbers and a layer with a weight norm, whose classes copy themselves in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.normed = nn.LSTM(2, WIDTH, batch_first=True), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(self.cell(x.view(x.shape[0], -1, 2))[0][:, -1])
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Guided(Plain):
    """It takes a number, which Dynamo makes a tensor of once it has changed."""

    def forward(self, x: Tensor, number: float = 1.0) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x * number)) * number))) / number
        return out


class Checkpointed(Plain):
    """Its second layer is recomputed in backward; its first is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.first(x))))
        x = checkpoint(self.second, x, use_reentrant=False)
        out: Tensor = self.head(torch.tanh(x))
        return out


class Single(Plain):
    """One layer alone: gradients that overflow are infinities and no NaN, if the batch has one row."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Forces(Plain):
    """It gives the gradient of an energy with respect to its input, as networks of atoms do."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():  # nothing has a gradient there
            return torch.tanh(self.first(x))[..., :4]
        with torch.enable_grad():
            given = x if x.requires_grad else x.clone().requires_grad_()
            energy = self.head(torch.tanh(self.second(torch.tanh(self.first(given)))))
            (force,) = torch.autograd.grad(10 * energy.sum(), given, create_graph=True)
        return -force[..., :4]


NETS = {net.__name__: net for net in (Plain, Residual, Broken, Adapter, Stateful, Recurrent, Checkpointed, Single, Forces, Copying, Guided)}
