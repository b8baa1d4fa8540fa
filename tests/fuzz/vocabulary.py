# ruff: noqa: E501 (a table reads best with a row a line, and several short rows on one)
"""The statements that programs are made of: text with placeholders, over 200 ops in all the spellings that PyTorch offers.

`{x}` is a value, `{y}` one that broadcasts with it, `{s}` one of the same shape, `{d}` a dim of x, `{k}` a small number, `{v}` and `{u}`
new names, `{lin}` a linear layer that keeps x's last size, `{w}` a parameter and `{buf}` a buffer of that size, `{n}` a fresh number.
A statement that does not fit its operands fails when it is tried, and another one is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Template:
    """One statement: its tag names it in signatures; one that is `exact` keeps small integers small integers."""

    tag: str
    text: str
    exact: bool = False


def _spelled(name: str, arguments: str = "") -> list[str]:
    """`name` of one tensor as torch's function, as a method, as torch.nn.functional's, in place, and into a given tensor."""
    rest = f", {arguments}" if arguments else ""
    found = []
    if hasattr(torch, name):
        found.append(f"{{v}} = torch.{name}({{x}}{rest})")
    if hasattr(torch.Tensor, name):
        found.append(f"{{v}} = {{x}}.{name}({arguments})")
    if hasattr(F, name):
        found.append(f"{{v}} = F.{name}({{x}}{rest})")
    if hasattr(torch.Tensor, f"{name}_"):
        found.append(f"{{v}} = {{x}}.clone().{name}_({arguments})")
    return found


EXACT_UNARY = ["neg", "abs", "relu", "square", "sign", "sgn", "floor", "ceil", "round", "trunc", "relu6", "clone", "contiguous", "positive", "detach", "hardtanh", "fliplr", "nan_to_num", "ravel", "flatten", "atleast_3d"]
SMOOTH_UNARY = ["exp2", "expm1", "sin", "cos", "tanh", "sigmoid", "gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "logsigmoid", "erf", "erfc", "atan", "asinh", "sinh", "cosh", "hardswish", "hardsigmoid", "softsign", "tanhshrink", "sinc", "i0", "frac", "arctan", "rad2deg"]
GUARDED_UNARY = {
    "log": "{x}.abs() + 1", "log1p": "{x}.abs()", "log2": "{x}.abs() + 1", "log10": "{x}.abs() + 1", "sqrt": "{x}.abs() + 1",
    "rsqrt": "{x}.abs() + 1", "reciprocal": "{x}.abs() + 1", "lgamma": "{x}.abs() + 1", "digamma": "{x}.abs() + 1",
    "asin": "torch.tanh({x}) * 0.5", "acos": "torch.tanh({x}) * 0.5", "atanh": "torch.tanh({x}) * 0.5", "erfinv": "torch.tanh({x}) * 0.5",
    "acosh": "{x}.abs() + 1.5", "logit": "torch.sigmoid({x})", "exp": "{x}.clamp(-4, 4)",
}  # fmt: skip
"""Ops with a pole or an end: what they are given instead of x."""
ARGUED = (
    ("leaky_relu", "0.5", True), ("threshold", "1.0, 0.0", True), ("hardshrink", "1.0", True), ("softshrink", "1.0", True),
    ("tril", "", True), ("triu", "", True), ("clamp", "-1, 2", True), ("clamp_min", "0", True), ("clamp", "max=2", True), ("pow", "2", True),
    ("flip", "(0,)", True), ("roll", "1, -1", True), ("unsqueeze", "{d}", True), ("squeeze", "{d}", True), ("transpose", "0, -1", True),
    ("movedim", "0, -1", True), ("swapaxes", "0, -1", True), ("narrow", "-1, 0, 2", True), ("select", "{d}, 0", True), ("clip", "-2, 2", True),
    ("diagonal", "", True), ("cumsum", "{d}", True), ("sum", "{d}", True), ("sum", "{d}, keepdim=True", True), ("sum", "", True),
    ("amax", "{d}", True), ("amin", "{d}, keepdim=True", True), ("nansum", "{d}", True), ("repeat_interleave", "2, dim=-1", True),
    ("tile", "(2,)", True), ("unflatten", "-1, (2, -1)", True), ("flatten", "0, 1", True), ("masked_fill", "{x} > 1, 0.0", True),
    ("fmod", "2.0", True), ("remainder", "2.0", True), ("mul", "{k}", True), ("add", "{k}", True), ("sub", "{k}, alpha=2", True),
    ("mean", "{d}", False), ("mean", "", False), ("mean", "-1, keepdim=True", False), ("prod", "{d}", False), ("softmax", "{d}", False),
    ("log_softmax", "{d}", False), ("logsumexp", "{d}", False), ("std", "-1", False), ("var", "-1, keepdim=True", False),
    ("norm", "dim=-1", False), ("norm", "", False), ("cumprod", "{d}", False), ("logcumsumexp", "{d}", False), ("nanmean", "{d}", False),
    ("div", "{k}", False), ("true_divide", "2", True), ("renorm", "2, 0, 1.0", False), ("softmin", "{d}", False), ("glu", "-1", False),
    ("normalize", "", False), ("pad", "(1, 1)", True), ("dropout", "0.0, True", True), ("alpha_dropout", "0.0, True", True),
    ("float_power", "2", False), ("logdet", "", False), ("trace", "", True), ("diag_embed", "", True), ("take", "torch.tensor([0, 1])", True),
    ("index_select", "-1, torch.tensor([1, 0])", True), ("unfold", "-1, 2, 1", True), ("gather", "-1, torch.zeros_like({x}).long()", True),
    ("index_fill", "-1, torch.tensor([0]), 2.0", True), ("expand", "2, *{x}.shape", True), ("repeat", "2, *([1] * {x}.dim())", True),
    ("as_strided", "(2, 2), (2, 1)", True), ("view", "-1", True), ("reshape", "-1, 2", True), ("broadcast_to", "(2, *{x}.shape)", True),
    ("rot90", "", True), ("layer_norm", "{x}.shape[-1:]", False), ("rms_norm", "{x}.shape[-1:]", False), ("unsqueeze", "0", True),
    ("avg_pool1d", "2, 1", False), ("max_pool1d", "2, 1", True), ("adaptive_avg_pool1d", "2", False), ("adaptive_max_pool1d", "2", True),
    ("lp_pool1d", "2, 2", False), ("max_pool2d", "2, 1", True), ("avg_pool2d", "2, 1", False), ("group_norm", "1", False),
    ("instance_norm", "", False), ("local_response_norm", "2", False), ("gumbel", "", False), ("channel_shuffle", "2", True),
)  # fmt: skip
BINARY = (
    ("add", True), ("sub", True), ("mul", True), ("maximum", True), ("minimum", True), ("rsub", True), ("fmax", True), ("fmin", True),
    ("copysign", True), ("heaviside", True), ("atan2", False), ("hypot", False), ("logaddexp", False), ("logaddexp2", False),
    ("xlogy", False), ("nextafter", False),
)  # fmt: skip
OPERATORS = ("+", "-", "*")

WRITTEN = (
    # arithmetic of two and three
    ("div", "{v} = {x} / ({y}.abs() + 1)"), ("div", "{v} = torch.div({x}, {y}.abs() + 1, rounding_mode='floor')"),
    ("floordiv", "{v} = {x} // 2", 1), ("mod", "{v} = {x} % 2", 1), ("rdiv", "{v} = 1 / ({x}.abs() + 1)"), ("rpow", "{v} = 2 ** {x}.clamp(-2, 2)"),
    ("pow", "{v} = ({x}.abs() + 1) ** 1.5"), ("iadd", "{v} = {x} * 1\n{v} += {y}", 1), ("imul", "{v} = {x} + 0\n{v} *= {y}", 1),
    ("rsub", "{v} = 1 - {x}", 1), ("lerp", "{v} = torch.lerp({x}, {s}, 0.5)"), ("lerp", "{v} = {x}.lerp({s}, torch.sigmoid({x}))"),
    ("addcmul", "{v} = torch.addcmul({x}, {s}, {s}, value=2)", 1), ("addcdiv", "{v} = {x}.addcdiv({s}, {s}.abs() + 1)"),
    ("where", "{v} = torch.where({x} > 0, {x}, {y})", 1), ("where", "{v} = {x}.where({s} > 0, 0.0)", 1), ("dist", "{v} = torch.dist({x}, {s})"),
    ("ldexp", "{v} = torch.ldexp({x}, torch.tensor(1))", 1), ("max2", "{v} = torch.max({x}, {y})", 1), ("bool", "{v} = ({x} > 0) * {x}", 1),
    ("bool", "{v} = {x} * (({y} >= 0) & ({y} < 2)).float()", 1), ("logical", "{v} = {x} * torch.logical_or({x} > 0, {x} < -1)", 1),
    ("isclose", "{v} = {x} * torch.isclose({x}, {x})", 1), ("square", "{v} = {x} * {x}", 1), ("double", "{v} = {x}.double().float()", 1),
    ("to", "{v} = {x}.to(torch.float32)", 1), ("type_as", "{v} = {x}.type_as({y})", 1), ("int", "{v} = {x} + {x}.int()", 1),
    ("to_half", "{v} = {x}.to(torch.bfloat16).float()", 1), ("long", "{v} = {x}.long() * {x}", 1), ("new", "{v} = {x} + {x}.new_ones(())", 1),
    ("like", "{v} = {x} * torch.full_like({x}, 2)", 1), ("eye", "{v} = {x} + torch.eye({x}.shape[-1])", 1), ("draw", "{v} = {x} + (torch.rand(()) > 2)", 1),
    ("arange", "{v} = {x} + torch.arange({x}.shape[-1])", 1), ("zeros", "{v} = torch.zeros({x}.shape)\n{v}[0] = {x}[0]", 1),
    ("scalar", "{v} = {x} * float({x}.shape[-1])", 1), ("item", "{v} = {x} + {x}.detach().amax().item()", 1), ("len", "{v} = {x} * len({x})", 1),
    # reductions with two results, order, counts
    ("max", "{v} = {x}.max({d}).values", 1), ("min", "{v} = torch.min({x}, {d})[0]", 1), ("median", "{v} = {x}.median({d}).values", 1),
    ("sort", "{v} = torch.sort({x}, {d})[0]", 1), ("topk", "{v} = {x}.topk(1, {d})[0]", 1), ("kthvalue", "{v} = {x}.kthvalue(1, {d})[0]", 1),
    ("cummax", "{v} = {x}.cummax({d})[0]", 1), ("aminmax", "{v} = sum(torch.aminmax({x}))", 1), ("argmax", "{v} = {x} + {x}.argmax({d}, keepdim=True)", 1),
    ("argsort", "{v} = {x} + {x}.argsort({d})", 1), ("count", "{v} = {x} * torch.count_nonzero({x})", 1), ("any", "{v} = {x} * {x}.any()", 1),
    ("std_mean", "{v} = sum(torch.std_mean({x}, -1))"), ("var_mean", "{v} = torch.var_mean({x}, -1)[1]"), ("mode", "{v} = {x}.mode({d})[0]", 1),
    ("norm", "{v} = torch.linalg.vector_norm({x}, dim=-1)"), ("matrix_norm", "{v} = torch.linalg.norm({x})"), ("diff", "{v} = torch.diff({x})", 1),
    ("hand_softmax", "{v} = ({x} - {x}.amax(-1, keepdim=True)).exp()\n{v} = {v} / {v}.sum(-1, keepdim=True)"),
    ("hand_norm", "{v} = ({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, keepdim=True, unbiased=False) + 1e-2)"),
    ("hand_rms", "{v} = {x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-2) * {w}"), ("hand_gelu", "{v} = 0.5 * {x} * (1 + torch.erf({x} / 2 ** 0.5))"),
    # other spellings: operands by keyword, in another order or in a list, writes through views and between the parts of a pattern
    ("keyword", "{v} = torch.sin(input={x})"), ("keyword", "{v} = torch.sum(dim=-1, input={x}, keepdim=True)", 1), ("keyword", "{v} = F.relu(inplace=False, input={x})", 1),
    ("keyword", "{v} = torch.sub(other={y}, input={x})", 1), ("keyword", "{v} = F.linear(weight={lin}.weight, input={x})", 1), ("keyword", "{v} = torch.softmax(dim=-1, input={x})"),
    ("write_keyword", "{v} = {x} * 1\nF.relu(input={v}, inplace=True)", 1), ("write_keyword", "{v} = {x} * 1\ntorch.neg_(input={v})", 1),
    ("write_list", "{v} = {x} * 1\ntorch._foreach_mul_([{v}], 2.0)", 1), ("write_float", "{v} = {lin}({x}).float()\n{v} -= 1", 1), ("write_float", "{v} = ({x} @ {s}.mT).float()\n{v} *= 2", 1),
    ("write_complex", "{v} = {lin}({x})[..., :2] * 1\ntorch.view_as_complex({v}).mul_(1j)", 1), ("write_bits", "{v} = {lin}({x})\n{v}.detach().view(torch.int32).bitwise_and_(-1)", 1),
    ("write_between", "{v} = {x} * 1\n{u} = {v} - {v}.mean(-1, keepdim=True)\n{v}.zero_()\n{v} = {u} * torch.rsqrt({u}.pow(2).mean(-1, keepdim=True) + 1e-2)"),
    ("fixed_statistics", "with torch.no_grad():\n    {u} = torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-2)\n{v} = {x} * {u}"),
    # batch norm in training, by its other names, and with statistics that it makes or changes
    ("batch_norm", "{v} = torch.batch_norm({lin}({x}), {w}, {w}, {buf}, {buf} + 1, True, 0.1, 1e-5, False)"), ("batch_norm", "{v} = F.batch_norm({x}, None, None, training=True)"),
    ("batch_norm", "{v} = F.batch_norm(torch.cat(({lin}({x})[..., :3], {lin}({x})), -1), None, None, training=True)"), ("batch_norm", "{v} = F.batch_norm(training=True, momentum=0.5, running_var={buf} + 1, running_mean={buf}, input={lin}({x}))"),
    # products
    ("linear", "{v} = {lin}({x})", 1), ("linear", "{v} = {lin}({lin}({x}))", 1), ("linear", "{v} = F.linear({x}, {lin}.weight)", 1),
    ("linear", "{v} = {lin}({x}) + {x}", 1), ("linear", "{v} = torch.relu({lin}({x}))", 1), ("linear", "{v} = {x} @ {lin}.weight.t()", 1),
    ("matmul", "{v} = {x} @ {s}.mT", 1), ("matmul", "{v} = torch.matmul({x}, {w})", 1), ("matmul", "{v} = {x}.matmul({lin}.weight)", 1),
    ("mm", "{v} = torch.mm({x}, {s}.t())", 1), ("bmm", "{v} = torch.bmm({x}, {s}.mT)", 1), ("bmm", "{v} = {x}.bmm({s}.transpose(1, 2))", 1),
    ("addmm", "{v} = torch.addmm({w}, {x}, {lin}.weight)", 1), ("baddbmm", "{v} = torch.baddbmm({w}, {x}, {x}.mT @ {x})", 1),
    ("addbmm", "{v} = torch.addbmm({w}, {x}, {x}.mT @ {x})", 1), ("mv", "{v} = torch.mv({x}, {w})", 1), ("dot", "{v} = torch.dot({x}.flatten(), {s}.flatten())", 1),
    ("inner", "{v} = torch.inner({x}, {w})", 1), ("outer", "{v} = torch.outer({x}.flatten()[:3], {w})", 1), ("vdot", "{v} = torch.vdot({w}, {w}) + {x}", 1),
    ("einsum", "{v} = torch.einsum('...i,ij->...j', {x}, {lin}.weight)", 1), ("einsum", "{v} = torch.einsum('bi,bj->ij', {x}, {x})", 1),
    ("einsum", "{v} = torch.einsum('ij->ji', {x})", 1), ("einsum", "{v} = torch.einsum('...ij->...ji', {x})", 1), ("kron", "{v} = torch.kron({x}[:1], {w})", 1),
    ("tensordot", "{v} = torch.tensordot({x}, {lin}.weight, 1)", 1), ("multi_dot", "{v} = torch.linalg.multi_dot([{x}, {lin}.weight, {lin}.weight])", 1),
    ("addmv", "{v} = torch.addmv({x}[:, 0], {x}, {w})", 1), ("addr", "{v} = torch.addr(torch.zeros(2, 2), {x}.flatten()[:2], {w}[:2])", 1),
    ("sdpa", "{v} = F.scaled_dot_product_attention({x}, {x}, {s})"), ("sdpa", "{v} = F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None], is_causal=True)[0]"),
    ("attention", "{v} = torch.softmax({lin}({x}) @ {x}.mT / 2, -1) @ {x}"), ("cdist", "{v} = torch.cdist({x}, {s} + 1)"),
    ("conv1d", "{v} = F.conv1d({x}, {x}.new_ones(2, {x}.shape[-2], 1))", 1), ("outer_mul", "{v} = {x}.unsqueeze(-1) * {w}", 1),
    ("matrix_power", "{v} = torch.matrix_power({lin}.weight, 2) @ {x}.mT", 1), ("chain", "{v} = {lin}({x}.relu()).relu() @ {lin}.weight", 1),
    # joining, cutting, picking
    ("cat", "{v} = torch.cat([{x}, {s}], -1)", 1), ("cat", "{v} = torch.cat(({x}, {x}.detach()), dim=0)", 1), ("stack", "{v} = torch.stack([{x}, {s}], {d})", 1),
    ("hstack", "{v} = torch.hstack([{x}, {s}])", 1), ("vstack", "{v} = torch.vstack([{x}, {s}])", 1), ("dstack", "{v} = torch.dstack([{x}, {s}])", 1),
    ("chunk", "{v}, {u} = {x}.chunk(2, -1)", 1), ("split", "{v}, {u} = torch.split({x}, 2, -1)", 1), ("tensor_split", "{v}, {u} = torch.tensor_split({x}, 2, -1)", 1),
    ("unbind", "{v} = torch.unbind({x}, {d})[0]", 1), ("unbind", "{v}, *_ = {x}", 1), ("index", "{v} = {x}[..., 1:]", 1), ("index", "{v} = {x}[:, None]", 1),
    ("index", "{v} = {x}[torch.tensor([0, 0])]", 1), ("index", "{v} = {x}[..., ::2]", 1), ("index", "{v} = {x}[-1]", 1), ("index", "{v} = {x}[{x}.sum(-1) > -99]", 1),
    ("permute", "{v} = {x}.permute(*reversed(range({x}.dim())))", 1), ("T", "{v} = {x}.mT", 1), ("t", "{v} = {x}.t()", 1), ("view_as", "{v} = {x}.view_as({x})", 1),
    ("view", "{v} = {x}.view({x}.shape[0], -1)", 1), ("view", "{v} = {x}.view({x}.size())", 1), ("reshape_as", "{v} = {s}.reshape_as({x})", 1),
    ("scatter", "{v} = {x}.scatter(-1, torch.zeros_like({x}).long(), 2.0)", 1), ("scatter_add", "{v} = torch.scatter_add({x}, -1, torch.zeros_like({x}).long(), {s})", 1),
    ("index_add", "{v} = {x}.index_add(0, torch.tensor([0]), {s}[:1])", 1), ("index_put", "{v} = {x}.index_put((torch.tensor([0]),), {s}[:1])", 1),
    ("select_scatter", "{v} = {x}.select_scatter({s}[..., 0], -1, 1)", 1), ("slice_scatter", "{v} = {x}.slice_scatter({s}[:1], 0, 0, 1)", 1),
    ("take_along", "{v} = torch.take_along_dim({x}, {x}.argsort(-1), -1)", 1), ("masked_select", "{v} = {x}.masked_select({x} > -99)", 1),
    ("block_diag", "{v} = torch.block_diag({x}[0], {x}[0])", 1), ("meshgrid", "{v}, {u} = torch.meshgrid({x}.flatten()[:2], {w}, indexing='ij')", 1),
    ("one_hot", "{v} = F.one_hot({x}.argmax(-1), {x}.shape[-1]) * {x}", 1), ("embedding", "{v} = F.embedding({x}.argmax(-1), {lin}.weight)", 1),
    ("interpolate", "{v} = F.interpolate({x}, scale_factor=2)", 1), ("complex", "{v} = torch.view_as_real(torch.complex({x}, {x}))", 1), ("real", "{v} = {x}.real", 1),
    ("diag", "{v} = torch.diag({x}.flatten()[:3])", 1), ("cartesian", "{v} = torch.combinations({x}.flatten()[:3])", 1), ("fft", "{v} = torch.fft.rfft({x}).abs()"),
    ("bucketize", "{v} = {x} + torch.bucketize({x}.detach(), torch.tensor([0.0, 1.0]))", 1), ("einops", "{v} = {x}.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)", 1),
    # losses and distances
    ("mse_loss", "{v} = F.mse_loss({x}, {s})"), ("l1_loss", "{v} = F.l1_loss({x}, {s}.detach(), reduction='sum')", 1), ("smooth_l1", "{v} = F.smooth_l1_loss({x}, {s})"),
    ("huber", "{v} = F.huber_loss({x}, {s}, reduction='none')"), ("cross_entropy", "{v} = F.cross_entropy({x}, {x}.argmax(-1))"),
    ("cross_entropy", "{v} = F.cross_entropy({x}, torch.softmax({x}, -1).detach(), label_smoothing=0.1)"), ("nll", "{v} = F.nll_loss({x}.log_softmax(-1), {x}.argmax(-1))"),
    ("kl_div", "{v} = F.kl_div({x}.log_softmax(-1), {s}.softmax(-1).detach(), reduction='sum')"), ("bce", "{v} = F.binary_cross_entropy_with_logits({x}, ({s} > 0).float())"),
    ("bce", "{v} = F.binary_cross_entropy(torch.sigmoid({x}) * 0.9 + 0.05, ({s} > 0).float())"), ("poisson", "{v} = F.poisson_nll_loss({x}.clamp(-2, 2), {s}.abs())"),
    ("gaussian", "{v} = F.gaussian_nll_loss({x}, {s}.detach(), {x}.abs() + 1)"), ("cosine", "{v} = F.cosine_similarity({x} + 2, {s} + 1, -1)"),
    ("pairwise", "{v} = F.pairwise_distance({x}, {s} + 1)"), ("soft_margin", "{v} = F.soft_margin_loss({x}, {s}.sign().detach() + 0.5)"),
    ("triplet", "{v} = F.triplet_margin_loss({x}, {s} + 1, {x}.flip(0))"), ("hinge", "{v} = F.margin_ranking_loss({x}, {s}, torch.ones_like({x}))", 1),
)  # fmt: skip

INPLACE = (
    ("inplace", "{x}.add_(1)", 1), ("inplace", "{x}.mul_(2)", 1), ("inplace", "{x}.add_({w})", 1), ("inplace", "{x}.add_({y})", 1), ("inplace", "{x}.relu_()", 1),
    ("inplace", "{x}[..., 0] = 1.0", 1), ("inplace", "{x}[0] = {x}[-1].clone() * 2", 1), ("inplace", "{x}.diagonal().add_(2)", 1), ("inplace", "{x}.zero_()", 1),
    ("inplace", "{x}.fill_(3.0)", 1), ("inplace", "{x}.copy_({s} * 2)", 1), ("inplace", "{x}.masked_fill_({x} > 1, 0.0)", 1), ("inplace", "{x}.clamp_(-1, 1)", 1),
    ("inplace", "{x}.view(-1)[0] = 2.0", 1), ("inplace", "{x}.index_add_(0, torch.tensor([0]), {s}[:1].clone())", 1), ("inplace", "{x}[{x} > 1] = 1.0", 1),
    ("inplace", "{x}[..., :1].mul_(2)", 1), ("inplace", "{x}.t().add_(1)", 1), ("inplace", "{x}.index_fill_(-1, torch.tensor([0]), 1.0)", 1),
    ("inplace", "F.relu({x}, inplace=True)", 1), ("inplace", "{x} += {lin}({x}.detach())", 1), ("inplace", "{x} *= 2", 1), ("inplace", "{x}.sub_({w}, alpha=2)", 1),
    ("inplace", "{x}.tanh_()"), ("inplace", "{x}.exp_()"), ("inplace", "{x}.div_(2)", 1), ("inplace", "{x}.squeeze_()", 1), ("inplace", "{x}.unsqueeze_(0)", 1),
    ("inplace", "{v} = {x}.view(-1)\n{v}.add_(1)", 1), ("inplace", "{v} = {x}[..., :2]\n{v} *= 2", 1), ("inplace", "{v} = {x}.mT\n{v}.mul_(2)", 1),
    ("inplace", "{v} = {x}.detach()\n{v}.mul_(2)", 1), ("out", "with torch.no_grad():\n    torch.add({x}, 1, out={x})", 1),
    ("out", "with torch.no_grad():\n    {v} = torch.mul({x}, {y}, out=torch.empty(0))", 1), ("out", "with torch.no_grad():\n    {v} = torch.matmul({x}, {lin}.weight, out=torch.empty(0))", 1),
    ("buffer", "{buf}.add_(1)\n{v} = {x} + {buf}", 1), ("buffer", "{buf} += 1", 1), ("buffer", "{buf}.copy_({x}.detach().flatten()[:{buf}.numel()])", 1), ("buffer", "{buf}.mul_(2)\n{v} = {buf} * {x}", 1),
    ("buffer", "{v} = {x} * {buf}\n{buf}.fill_(1)", 1), ("buffer", "with torch.no_grad():\n    {buf}.mul_(0.5).add_({x}.detach().flatten()[:{buf}.numel()], alpha=0.5)"),
    ("buffer", "t{n} = {buf}.clone()\n{buf}.neg_()\n{v} = {x} * t{n}", 1), ("buffer", "{v} = {x} * ({buf} * 2)\n{buf}.neg_()", 1), ("buffer", "{buf}.neg_()\n{v} = torch.where({buf} > 0, {x}, {x} * 2)", 1),
    ("buffer", "{v} = Doubled.apply({x}, {buf})\n{buf}.neg_()", 1), ("buffer", "{buf}.neg_()\n{v} = checkpoint(lambda t: t * ({buf} + 1), {x}, use_reentrant=False)", 1),
    ("counter", "self.count += 1\n{v} = {x} * (self.count % 2 + 1)", 1), ("data", "{x}.data.mul_(2)", 1),
    ("array", "self.array.fill(self.array[0] % 2 + 1)\n{v} = {x} * torch.from_numpy(self.array).clone()", 1),
    ("array", "self.array *= -1\n{v} = {x} + torch.from_numpy(self.array)", 1),
    ("inplace", "{v} = {x}.expand(2, *{x}.shape).clone()\n{v}[0].add_(1)", 1), ("inplace", "torch.relu_({x})", 1), ("inplace", "{x}.requires_grad_()", 1),
)  # fmt: skip

CONTROL = (
    ("break", "torch._dynamo.graph_break()", 1), ("break", "torch._dynamo.graph_break()", 1), ("if_value", "if {x}.sum() > 0:\n    {v} = {x} * 2\nelse:\n    {v} = {x} + 1", 1),
    ("if_shape", "{v} = {x} * 2 if {x}.shape[0] > 1 else {x}", 1), ("if_training", "{v} = {lin}({x}) if self.training else {x}", 1), ("loop", "{v} = {x}\nfor _ in range(2):\n    {v} = {lin}({v})", 1),
    ("comprehension", "{v} = torch.stack([{x} * i for i in range(3)])", 1), ("while", "{v} = {x}\nwhile {v}.sum() > 100:\n    {v} = {v} * 0", 1), ("tolist", "{v} = {x} + len({x}.tolist())", 1),
    ("broken", "torch._dynamo.graph_break()\n{v} = {x}.permute(*range({x}.dim())[::-1])", 1), ("broken", "self.count += 1\ntorch._dynamo.graph_break()\n{v} = {x}.permute(*range({x}.dim())[::-1])", 1), ("broken", "{v} = {x}.permute(*range({x}.dim())[::-1])", 1),
    ("print_break", "len(str({x}.detach().tolist()))", 1), ("try", "try:\n    {v} = {x} * 2\nfinally:\n    pass", 1), ("closure", "def inner{n}(t):\n    return {lin}(t) + {x}\n{v} = inner{n}({x})", 1),
    ("no_grad", "with torch.no_grad():\n    {v} = {lin}({x})", 1), ("no_grad", "with torch.no_grad():\n    {x}.mul_(2)", 1), ("enable_grad", "with torch.enable_grad():\n    {v} = {lin}({x})", 1),
    ("set_grad", "torch.set_grad_enabled(torch.is_grad_enabled())\n{v} = {x} * 1", 1), ("detach", "{v} = {lin}({x}.detach())", 1), ("no_autocast", "with torch.autocast('cpu', enabled=False):\n    {v} = {lin}({x})", 1),
    ("cond", "{v} = cond({x}.sum() > 0, lambda t: {lin}(t) * 2, lambda t: {lin}(t), ({x},))", 1), ("cond", "{v} = cond({x}.sum() > 99, lambda t: t @ t.mT, lambda t: (t + 1) @ t.mT, ({x},))", 1),
    ("while_loop", "{u}, {v} = while_loop(lambda i, c: i < 2, lambda i, c: (i + 1, {lin}(c)), (torch.tensor(0), {x}))", 1),
    ("while_loop", "{u}, {v} = while_loop(lambda i, c: i < 2, lambda i, c: (i + 1, torch.relu(c @ {lin}.weight)), (torch.tensor(0), {x}))", 1),
    ("scan", "{u}, {v} = scan(lambda c, t: (c + t, (c + t) @ {lin}.weight), torch.zeros_like({x}[0]), {x})", 1), ("map", "{v} = hop_map(lambda t: t @ {lin}.weight, {x})", 1),
)  # fmt: skip

REGIONS = (
    ("region", "{v} = {lin}({x})\nfor _ in range(2):\n    {v} = region({v}, {lin}.weight)", 1), ("region", "t{n} = {lin}({x})\n{v} = region(t{n}, {lin}.weight) + region(t{n} + 1, {lin}.weight)", 1),
    ("region", "t{n} = {lin}({x})\n{u} = {lin}({x} + 1)\n{v} = region_writing(t{n}, {lin}.weight) + region_writing({u}, {lin}.weight) + t{n} + {u}", 1), ("region", "{v} = region({x}, {lin}.weight)", 1),
    ("region", "{v} = {lin}({x})\nfor _ in range(2):\n    {v}, _, {u} = region_of_more({v}, {lin}.weight)\n{u}.mul_(2)", 1), ("region", "t{n} = {lin}({x})\n{v}, _, _ = region_of_more(t{n}, {lin}.weight)\n{u} = region_of_more(t{n} * 2, {lin}.weight)[2] + {v}", 1),
    ("region", "{v} = {lin}({x})\nfor _ in range(2):\n    {v} = checkpoint(region, {v}, {lin}.weight, use_reentrant=False)", 1), ("region", "{v} = checkpoint(lambda t: region(region({lin}(t), {lin}.weight), {lin}.weight), {x}, use_reentrant=False)", 1),
)  # fmt: skip
"""Code that `torch.compile` is asked to compile once for all of its calls; it inlines code that is called once, or with another kind of value."""

CHECKPOINTS = (
    ("checkpoint", "{v} = checkpoint({lin}, {x}, use_reentrant=False)", 1), ("checkpoint", "{v} = checkpoint(lambda t: torch.relu({lin}(t)), {x}, use_reentrant=False)", 1),
    ("checkpoint", "{v} = checkpoint({lin}, {x} * {w}, use_reentrant=True)", 1), ("checkpoint_sequential", "{v} = checkpoint_sequential([{lin}, nn.ReLU()], 2, {x}, use_reentrant=False)", 1),
    ("checkpoint_sequential", "{v} = checkpoint_sequential([{lin}, {lin}], 2, {x}, use_reentrant=False)", 1), ("checkpoint", "{v} = checkpoint({lin}, {x}, use_reentrant=False)\n{u} = {v}[..., 0]\n{u}.add_(2)", 1),
    ("checkpoint", "{v} = checkpoint({lin}, {x}, use_reentrant=False)\n{v}.diagonal().add_(10)", 1), ("checkpoint", "def part{n}(t):\n    t = {lin}(t)\n    return t, t.relu()\n{v}, {u} = checkpoint(part{n}, {x}, use_reentrant=False)", 1),
    ("selective_checkpoint", "{v} = checkpoint({lin}, {x}, use_reentrant=False, context_fn=keep_products)", 1), ("selective_checkpoint", "{v} = checkpoint(lambda t: {lin}({lin}(t).relu()) + t, {x} * {w}, use_reentrant=False, context_fn=keep_products)", 1),
    ("selective_checkpoint", "{v} = checkpoint(lambda t: torch.tanh(t @ t.mT), {lin}({x}), use_reentrant=False, context_fn=keep_products)"),
)  # fmt: skip

DERIVATIVES = (
    # gradients of None: what a Function does not learn, what a caller's Function does not read, hooks that give nothing
    ("unread", "{v} = Unlearnt.apply({x}, {lin}.weight)", 1), ("unread", "{v}, {u} = Sink.apply({x} * 2, {lin}({x}))", 1), ("unread", "{v}, {u} = Sink.apply({lin}({x}), torch.relu({x} @ {lin}.weight))", 1),
    ("unread", "t{n} = {lin}({x})\nif t{n}.requires_grad:\n    t{n}.register_hook(lambda g: None if g is None else g * 2)\n{v}, {u} = Sink.apply({x} * 2, t{n})", 1),
    ("unread", "t{n} = {lin}({x})\ntorch._dynamo.graph_break()\n{v}, {u} = Sink.apply({x} * 2, t{n}.relu())", 1), ("unread", "{v}, {u} = Sink.apply({lin}({x}), F.cross_entropy({lin}({x}), {x}.argmax(-1)))"),
    ("hook_none", "{u} = {lin}({x})\nif {u}.requires_grad:\n    {u}.register_hook(lambda g: None)\n{v} = {u} * 2", 1), ("hook_none", "if {x}.requires_grad:\n    {x}.register_hook(lambda g: None)\n{v} = {lin}({x})", 1),
    ("function", "{v} = Square.apply({x})", 1), ("function", "{v} = Product.apply({x}, {lin}.weight)", 1), ("function", "{v} = Product.apply(Product.apply({x}, {lin}.weight), {lin}.weight)", 1),
    ("function", "{v} = Through.apply({x})", 1), ("function", "{v} = Bounded.apply({x}, {lin}.weight)", 0), ("function", "{v}, {u} = Two.apply({x}, {lin}.weight)", 1), ("hook", "if {x}.requires_grad:\n    {x}.register_hook(lambda g: g * 2)", 1),
    ("hook", "{v} = {lin}({x})\nif {v}.requires_grad:\n    {v}.register_hook(lambda g: g.clamp(-1, 1))", 1),
    ("hook_identity", "{u} = {x}.contiguous()\nif {u}.requires_grad:\n    {u}.register_hook(lambda g: g * 2)\n{v} = {lin}({u}) + {x}", 1), ("hook_identity", "{u} = F.dropout({lin}({x}), 0.0)\nif {u}.requires_grad:\n    {u}.register_hook(lambda g: g * 2)\n{v} = {u} * 2", 1),
    ("hook_identity", "t{n} = {lin}({x})\n{u} = t{n}.to(t{n}.dtype)\nif {u}.requires_grad:\n    {u}.register_hook(lambda g: g.clamp(-1, 1))\n{v} = t{n} @ t{n}.mT", 1), ("hook_identity", "{u} = {lin}({x}).view_as({x})\nif {u}.requires_grad:\n    {u}.register_hook(lambda g: -g)\n{v} = {u}.relu()", 1),
    ("hook_written", "if {x}.requires_grad:\n    {x}.register_hook(lambda g: g.clamp(-0.5, 0.5))\n{x}.mul_(3)"), ("hook_written", "if {x}.requires_grad:\n    {x}.register_hook(lambda g: g * 2)\n{x}.diagonal().add_(2)"),
    ("func_grad", "{v} = torch.func.grad(lambda t: (t * t).sum())({x})", 1),
    ("func_jvp", "{v} = torch.func.jvp(lambda t: t * 2, ({x},), ({x},))[1]", 1), ("func_vjp", "{v} = torch.func.vjp(lambda t: t * t, {x})[1]({x})[0]", 1), ("func_vmap", "{v} = torch.func.vmap(lambda t: t * 2)({x})", 1),
    ("func_vmap", "{v} = torch.func.vmap(lambda t: {lin}(t))({x})", 1), ("func_grad", "{v} = torch.func.grad(lambda t: {lin}(t).sum())({x})", 1), ("func_jac", "{v} = torch.func.jacrev(lambda t: (t * t).sum(-1))({x}[0])", 1),
    ("func_vmap", "{v} = torch.func.vmap(torch.tanh)({x})"), ("func_vjp", "{v} = torch.func.vjp(torch.sigmoid, {lin}({x}))[0]"), ("func_grad", "{v} = torch.func.grad(lambda t: torch.tanh(t).sum())({lin}({x}))"),
    ("hook_identity", "{u} = {lin}({x})\nif {u}.requires_grad:\n    {u}.register_hook(lambda g: g * 2)\n{v} = {u}.contiguous()", 1),
    ("hook_identity", "{u} = {lin}({x})\n{v} = F.dropout({u}, 0.0)\nif {v}.requires_grad:\n    {v}.register_hook(lambda g: g * 2)", 1),
    ("autograd_grad", "{v} = torch.autograd.grad({lin}({x}).relu().sum(), {x}, create_graph=True)[0]", 1), ("autograd_grad", "{v} = torch.autograd.grad((torch.tanh({lin}({x})) ** 2).sum(), {x}, create_graph=True)[0]"),
    ("autograd_grad", "{u} = {lin}({x})\n{v} = torch.autograd.grad({lin}({u}.relu()).sum() + ({u} * {u}).sum(), {u}, create_graph=True)[0]", 1),
    ("autograd_grad", "{u} = {lin}({x})\n{v} = -torch.autograd.grad({lin}({u}.tanh()).sum() + {u}.logsumexp(-1).sum(), {u}, create_graph=True)[0]"),
    ("autograd_grad", "{v} = {x} + torch.autograd.grad({lin}({x}).sum(), {lin}.weight, create_graph=True)[0].sum()", 1),
)  # fmt: skip

ODD = (
    ("bits", "{v} = ({x}.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)", 1), ("bits", "{v} = {lin}({x}).view(torch.int32).view(torch.float32)", 1), ("bits", "{v} = {x} + {x}.view(torch.int16).shape[-1]", 1),
    ("finfo", "{v} = {x}.clamp(min=torch.finfo({x}.dtype).min)", 1), ("masked_scores", "{v} = ({x} + torch.full({x}.shape[-1:], torch.finfo({x}.dtype).min).triu(1)).softmax(-1)"),
    ("dtype", "{v} = {x} * (2 if {x}.dtype == torch.float32 else 3)", 1), ("element_size", "{v} = {x} * {x}.element_size()", 1), ("stride", "{v} = {x} * {x}.stride(-1)", 1), ("contiguous", "{v} = {x} + int({x}.is_contiguous())", 1),
    ("identity", "{v} = {x} * 2 if {x} is {x} else {x}", 1), ("isfinite", "{v} = {x} * {x}.isfinite()", 1), ("tensor", "{v} = {x} + torch.tensor([1.0] * {x}.shape[-1])", 1),
    ("wide", "{v} = (({x} * 300.0) * 300.0) / 90000.0"), ("tiny", "{v} = ({x} * 1e-4 * 1e-4) * 1e8"), ("set_attribute", "self.seen = {x}.detach()\n{v} = {x} + self.seen", 1), ("param_view", "{v} = {x} @ {lin}.weight.view_as({lin}.weight)", 1),
)  # fmt: skip

RANGE = (
    ("large", "{v} = F.linear({x} * 2.0**17, {lin}.weight) * 2.0**-17", 1), ("large", "{v} = (({x} * 2.0**9) @ ({s}.mT * 2.0**9)) * 2.0**-18", 1), ("large", "{v} = {lin}({x} * 1e5) * 1e-5"),
    ("large", "{v} = ({lin}({x} * 1e3).square() + 1).rsqrt()"), ("large", "{v} = torch.softmax({lin}({x}) * 1e5, -1)"), ("large", "t{n} = {lin}({x} * 2.0**17)\n{v} = t{n} / t{n}.abs().amax().clamp(min=1)"),
    ("large_mask", "{v} = {x} + {x}.masked_fill(torch.arange({x}.shape[-1]) % 2 == 0, -2.0**30) * 2.0**-30", 1), ("large_mask", "{v} = {x} + ({lin}({x}) + (torch.arange({x}.shape[-1]) % 2 == 0) * -2.0**30) * 2.0**-30", 1),
    ("large_mask", "{v} = {x} + torch.where(torch.arange({x}.shape[-1]) % 2 == 0, -1e12, {x}).clamp(min=-2.0**20) * 2.0**-20", 1), ("large_mask", "{v} = {x} * ({x}.masked_fill(torch.arange({x}.shape[-1]) % 2 == 0, -1e9) > -1e8)", 1),
    ("large_mask", "{v} = {x} + torch.relu({x}.masked_fill(torch.arange({x}.shape[-1]) % 2 == 0, -1e9))", 1), ("large_mask", "t{n} = {lin}({x})\n{v} = t{n} + t{n}.masked_fill(torch.arange(t{n}.shape[-1]) % 2 == 0, 1e30).mean(-1, keepdim=True) * 1e-30", 1),
    ("large", "{u} = {lin}({x})\ntorch._dynamo.graph_break()\n{v} = F.linear({u} * 2.0**17, {lin}.weight) * 2.0**-17", 1),
    ("small", "{v} = F.linear({x} * 2.0**-30, {lin}.weight) * 2.0**30", 1), ("small", "{v} = F.linear({x}, {lin}.weight * 2.0**-30) * 2.0**30", 1), ("small", "{v} = {x} / (({lin}({x}) * 1e-6).square() + 1e-9).sqrt() * 1e-4"),
    ("large_checkpoint", "{v} = checkpoint(lambda t: F.linear(t * 2.0**17, {lin}.weight) * 2.0**-17, {x}, use_reentrant=False)", 1), ("large_checkpoint", "{v} = checkpoint(lambda t: {lin}(t * 1e5).relu() * 1e-5, {x}, use_reentrant=False)"),
    ("large_checkpoint", "{v} = checkpoint(lambda t: F.linear(t * 2.0**17, {lin}.weight) * 2.0**-17, {x} * {w}, use_reentrant=True)", 1), ("large_checkpoint", "{v} = checkpoint(lambda t: {lin}(t * 1e5) * 1e-5, {lin}({x}), use_reentrant=True)"),
    ("large_checkpoint", "{v} = checkpoint({lin}, {x} * 1e6, use_reentrant=False) * 1e-6"), ("large_checkpoint", "{v} = checkpoint({lin}, {lin}({x}) * 1e6, use_reentrant=True) * 1e-6"),
    ("large_checkpoint", "{v} = checkpoint({lin}, {x}, use_reentrant=False)\n{v} = checkpoint({lin}, {v} * 1e6, use_reentrant=False) * 1e-6"), ("large_checkpoint", "{v} = checkpoint_sequential([{lin}, nn.Hardtanh(), {lin}], 2, {x} * 1e6, use_reentrant=False) * 1e-6"),
    ("nested_checkpoint", "{v} = checkpoint(lambda t: checkpoint({lin}, t * 1e6, use_reentrant=False) * 1e-6, {x}, use_reentrant=False)"), ("nested_checkpoint", "{v} = checkpoint(lambda t: checkpoint({lin}, t * 1e6, use_reentrant=True) * 1e-6, {lin}({x}), use_reentrant=True)"),
    ("nested_checkpoint", "{v} = checkpoint(lambda t: checkpoint(lambda u: F.linear(u * 2.0**17, {lin}.weight) * 2.0**-17, {lin}(t), use_reentrant=False), {x}, use_reentrant=False)", 1),
    ("nested_checkpoint", "{v} = checkpoint(lambda t: checkpoint({lin}, checkpoint({lin}, t, use_reentrant=True) * 1e6, use_reentrant=True) * 1e-6, {lin}({x} * {w}), use_reentrant=True)"),
    ("nested_checkpoint", "{v} = checkpoint(lambda t: checkpoint({lin}, t * 1e6, use_reentrant=False) * 1e-6, {x} * {w}, use_reentrant=True)"), ("small_checkpoint", "{v} = checkpoint(lambda t: F.linear(t * 2.0**-30, {lin}.weight) * 2.0**30, {x}, use_reentrant=False)", 1),
    ("large_cond", "{v} = cond({x}.sum() > 0, lambda t: F.linear(t * 2.0**17, {lin}.weight) * 2.0**-17, lambda t: F.linear(t, {lin}.weight), ({x},))", 1), ("large_cond", "{v} = cond({x}.sum() > -99, lambda t: {lin}(t * 1e5) * 1e-5, lambda t: {lin}(t), ({x},))"),
    ("large_cond", "{v} = cond({x}.sum() > 0, lambda t: {lin}(t), lambda t: {lin}(t), ({x} * 1e6,)) * 1e-6"), ("large_while", "{u}, {v} = while_loop(lambda i, c: i < 2, lambda i, c: (i + 1, F.linear(c * 2.0**17, {lin}.weight) * 2.0**-17), (torch.tensor(0), {x}))", 1),
    ("large_while", "{u}, {v} = while_loop(lambda i, c: i < 3, lambda i, c: (i + 1, {lin}(c) * 1e3), (torch.tensor(0), {x}))\n{v} = {v} * 1e-9"), ("large_scan", "{u}, {v} = scan(lambda c, t: (c + t, F.linear((c + t) * 2.0**17, {lin}.weight) * 2.0**-17), torch.zeros_like({x}[0]), {x})", 1),
    ("large_unread", "{v}, _ = scan(lambda c, t: (c + t, F.linear((c + t) * 2.0**17, {lin}.weight) * 2.0**-17), torch.zeros_like({x}[0]), {x})", 1), ("large_unread", "{v}, {u} = scan(lambda c, t: (c + t, F.linear((c + t) * 2.0**17, {lin}.weight) * 2.0**-17), torch.zeros_like({x}[0]), {x})\n{v} = {v} * ({u} > 0)", 1),
    ("large_unread", "{v}, _ = cond({x}.sum() > -99, lambda t: ({lin}(t), F.linear(t * 2.0**17, {lin}.weight) * 2.0**-17), lambda t: ({lin}(t), {lin}(t)), ({x},))"),
    ("small", "{v} = torch.log({lin}({x}).softmax(-1) * 1e-5)"), ("small", "{v} = {lin}({x}) / ({lin}({x}).softmax(-1) * 1e-6).sqrt() * 1e-3"), ("small", "{v} = F.linear({x}, {lin}.weight, {lin}.bias * 1e-12)"),
    ("steps", "{v} = {x}\nfor _ in range(12):\n    {v} = {v} + 0.1 * torch.tanh({lin}({v}))"), ("steps", "{v} = {lin}({x})\nfor _ in range(16):\n    {v} = {v} - 0.05 * {v}.tanh()"),
    ("steps", "{u} = torch.linspace(1, 0, 13)\n{v} = {x}\nfor i in range(12):\n    {v} = {v} + ({u}[i + 1] - {u}[i]) * torch.tanh({lin}({v}))"), ("offset", "t{n} = {lin}({x})\n{v} = F.layer_norm(t{n} + torch.full(t{n}.shape[-1:], 300.0), t{n}.shape[-1:])"),
    ("many_readers", "{u} = F.layer_norm({x}, {x}.shape[-1:])\n{v} = sum({lin}({u}) * {lin}({u} * 0.5).tanh() for _ in range(9))"), ("many_readers", "{u} = {x}.softmax(-1)\n{v} = {u}.mT @ {u}\nfor _ in range(9):\n    {v} = ({u} @ {v}).tanh().mT @ {u}"),
    ("many_rows", "{u} = {lin}({x}).expand(1200, *{x}.shape)\n{v} = F.layer_norm({u}, {x}.shape[-1:], {w}).mean(0)"), ("many_rows", "{v} = ({lin}({x}) @ {lin}.weight[torch.arange(1500) % 2].mT).mean(-1, keepdim=True) + {x}"),
    ("many_rows", "{v} = {lin}({x}) + F.layer_norm(({x} @ {lin}.weight).unsqueeze(0).repeat(900, *[1] * {x}.dim()), {x}.shape[-1:], {w}, {w}).mean(0)"), ("many_rows", "{u} = torch.cat([{w}.unsqueeze(0)] * 200)\n{v} = {lin}({x}) + ({u} @ {lin}.weight).mean(0)"),
    ("distance", "{u} = {lin}({x})\nt{n} = ({u} * {u}).sum(-1, keepdim=True) + {lin}.weight.square().sum(-1) - 2 * {u} @ {lin}.weight.mT\n{v} = (-t{n}).softmax(-1) * t{n}"), ("distance", "{u} = {lin}({x})\nt{n} = ({u}.unsqueeze(-2) - {lin}.weight).square().sum(-1)\n{v} = 1 / (1 + t{n})\n{v} = {v} / {v}.sum(-1, keepdim=True)"),
    ("kink", "{u} = F.embedding({x}.argmax(-1) % 2, {lin}.weight)\n{v} = {lin}(torch.maximum({u}, {w}))"), ("kink", "{u} = F.embedding({x}.argmin(-1) % 2, {lin}.weight)\n{v} = {lin}(({u} - {w}).abs())"), ("kink", "{v} = {lin}(({x} * {w}).sort(-1)[0])"), ("kink", "{v} = {lin}(({x} * {w}).clamp(-0.5, 0.5).topk(2, -1)[0].repeat(*[1] * ({x}.dim() - 1), {x}.shape[-1])[..., : {x}.shape[-1]])"),
    ("offset", "{v} = {lin}(({x} + 1000) - 999)"), ("offset", "{u} = {x} + 300\n{v} = {lin}(F.layer_norm({u}, {u}.shape[-1:]))"), ("offset", "{u} = {x} * 0.01 + 50\n{v} = {lin}(({u} - {u}.amin()) / ({u}.amax() - {u}.amin() + 0.01))"),
    ("offset", "{v} = {lin}({x}) / (1 - torch.sigmoid({w}) * 1e-3 - 0.99)"), ("offset", "{u} = {w} + 200\n{v} = ({lin}({x}) + {u}) - {u}"), ("offset", "{v} = ({lin}({x}) * 0.5 + ({w} + 500)) - 500"), ("offset", "{u} = {x} * 3 + 100\n{v} = {lin}({u} - {u}.floor())"),
    ("offset", "{v} = torch.where({x} + 700 > 700.25, {lin}({x}), {x})"), ("offset", "{v} = checkpoint(lambda t: {lin}(t - 400), {x} + 400, use_reentrant=False)"),
    ("met", "{u} = {x} + 300\n{v} = torch.where({x} > -0.5, {u}, {lin}({x}) + 300)\n{v} = {lin}({v} - {v}.mean(-1, keepdim=True))"), ("met", "{u} = {x} + 300\n{v} = torch.stack([{u}, {lin}({x})])[0]\n{v} = {lin}({v} - 300)"),
    ("met", "{u} = {x} + 300\n{v} = torch.maximum({u}, {lin}({x}))\n{v} = {lin}(F.layer_norm({v}, {v}.shape[-1:]))"), ("met", "{u} = {x} + 300\n{v} = {u} * torch.sigmoid({lin}({x}).mean(-1, keepdim=True))\n{v} = {lin}({v} - {v}.mean(-1, keepdim=True))"),
    ("stream", "{u} = {x} + 300\n{v} = {u}\nfor _ in range(4):\n    {v} = {v} + torch.tanh({lin}({v} - {u}))\n{v} = {lin}({v} - {u})"), ("stream", "{u} = {w} * 40\n{v} = {lin}(({lin}({x}) + {u}) - {u})"),
    ("carried", "{u} = {lin}({x})\n{v} = torch.zeros_like({x})\nfor _ in range(40):\n    {v} = 0.99 * {v} + 0.01 * {u}"), ("carried", "{v} = {w}.expand_as({x})\nfor _ in range(24):\n    {v} = {v} + torch.sigmoid({w} - 4) * torch.tanh({lin}({v}) + {x})"),
    ("shares", "t{n} = torch.sigmoid({lin}({x}) * 20)\n{v} = {lin}({x}) * F.binary_cross_entropy(t{n}, torch.ones_like(t{n}))"), ("shares", "{v} = (1 - torch.sigmoid({lin}({x}) * 4)).log()"),
    ("met", "{u} = {x} + 300\n{v} = torch.sigmoid({lin}({x}))\n{v} = {lin}({v} * ({u} + {x}.tanh()) - {v} * {u})"), ("learnt", "{u} = F.embedding({x}.argmax(-1) % 2, {lin}.weight)\n{v} = {lin}({x}) * (1 - {u}.square().sum(-1, keepdim=True))"),
    ("averaged", "{u} = ({lin}({x}) + 4).float()\n{v} = {lin}({x}) + ({u} * {u}).mean(-1, keepdim=True) - {u}.mean(-1, keepdim=True) ** 2"), ("averaged", "{u} = ({lin}({x}) * {w} + 2).square().sum(-1, keepdim=True)\n{v} = {lin}({x}) * ({u} - {u}.mean())"),
    ("magnified", "{v} = {lin}((1 - torch.sigmoid({lin}({x}).float() + 2)) * 50)"), ("magnified", "{u} = {lin}({x}) * {w}\n{v} = {lin}(torch.log(1 + 1e-3 * {u}.tanh()) * 300)"), ("magnified", "{v} = {lin}(({lin}({x}) * {w} + 500) - 500)"),
    ("prior", "{v} = {lin}(({lin}({x}) + 3 * {x} - 300).softmax(-1))"), ("prior", "{v} = {lin}(({lin}({x}) + (3 * {x} - 300).masked_fill({x} > 1, -1e9)).softmax(-1))"),
    ("large_hidden", "{v} = torch.nan_to_num(F.linear({x} * 2.0**17, {lin}.weight)) * 2.0**-17", 1), ("large_hidden", "t{n} = F.linear({x} * 2.0**17, {lin}.weight)\n{v} = t{n}.where(t{n}.isfinite(), 0.0) * 2.0**-17", 1),
    ("large_refused", "t{n} = torch.softmax({lin}({x} * 1e6) * 1e-6, -1)\n{v} = F.binary_cross_entropy(t{n} * 0.9 + 0.05, torch.zeros_like(t{n}))"),
    ("large_refused", "{v} = {lin}({x}) * F.binary_cross_entropy({lin}({x} * 1e5).softmax(-1) * 0.5, {lin}({x}).detach() * 0 + 1)"),
    ("large_hidden", "{v} = checkpoint(lambda t: F.linear(t * 2.0**17, {lin}.weight).nan_to_num_() * 2.0**-17, {x}, use_reentrant=False)", 1), ("large_hidden", "{v} = {lin}({x}) * (1 + {lin}({x} * 1e6).abs()).rsqrt() * 1e3"),
    ("large_hidden", "{u}, {v} = scan(lambda c, t: (c + t, torch.nan_to_num(F.linear(t * 2.0**17, {lin}.weight)) * 2.0**-17), torch.zeros_like({x}[0]), {x})", 1), ("large_hidden", "{v} = {lin}({x}) / (1 + {lin}({x} * 1e6).abs()) * 1e6"),
    ("large_hidden", "{v} = cond({x}.sum() > -99, lambda t: torch.nan_to_num(t) * 2.0**-17, lambda t: t * 2.0**-17, (F.linear({x} * 2.0**17, {lin}.weight),))", 1),
    ("large_map", "{v} = hop_map(lambda t: F.linear(t * 2.0**17, {lin}.weight) * 2.0**-17, {x})", 1), ("large_function", "{v} = Product.apply({x} * 2.0**17, {lin}.weight) * 2.0**-17", 1), ("large_function", "{v} = Wide.apply({x}, {lin}.weight)", 1),
    ("large_function", "{v} = checkpoint(lambda t: Wide.apply(t, {lin}.weight), {x}, use_reentrant=False)", 1), ("large_function", "{v}, {u} = Two.apply({x} * 1e5, {lin}.weight)\n{v}, {u} = {v} * 1e-5, {u} * 1e-5"),
    ("large_func", "{v} = torch.func.vmap(lambda t: F.linear(t * 2.0**17, {lin}.weight) * 2.0**-17)({x})", 1), ("large_func", "{v} = torch.func.grad(lambda t: ({lin}(t * 1e5) * 1e-5).sum())({x})"),
    ("large_grad", "{v} = torch.autograd.grad(({lin}({lin}({x}) * 1e6) * 1e-6).square().sum(), {x}, create_graph=True)[0]"), ("large_grad", "{u} = {lin}({x})\n{v} = torch.autograd.grad(({lin}({u} * 1e5) * 1e-5).tanh().sum(), {u}, create_graph=True)[0]"), ("large_inplace", "t{n} = {lin}({x})\nt{n}.mul_(2.0**17)\n{v} = F.linear(t{n}, {lin}.weight) * 2.0**-17", 1),
    ("large_parameter", "with torch.no_grad():\n    {lin}.bias.mul_(0.5)\n{v} = {lin}({x} * 1e5) * 1e-5"), ("large_parameter", "{lin}.weight.data.mul_(-0.5)\n{v} = {lin}({x} * 1e5) * 1e-5"),
    ("large_buffer", "{buf}.mul_(2.0**9)\n{v} = F.linear({x} * 2.0**9, {lin}.weight) * {buf} * 2.0**-18\n{buf}.mul_(2.0**-9)", 1), ("large_module", "{v} = nn.functional.layer_norm({lin}({x} * 1e5), {x}.shape[-1:])"),
)  # fmt: skip
"""Values beyond what fp16 holds, and below, on the way to ones that it holds: by themselves and in all bodies there are."""

MODULES = (
    ("Joined({C}, 5)", 0), ("Joined({C}, 3)", 0),
    ("nn.Linear({L}, 4)", 1), ("nn.Linear({L}, 3)", 1), ("nn.Linear({L}, 4, bias=False)", 1), ("nn.Sequential(nn.Linear({L}, 4), nn.ReLU(), nn.Linear(4, 4))", 1), ("nn.ReLU(inplace=True)", 1),
    ("nn.Conv1d({C}, 4, 3, padding=1)", 1), ("nn.Conv1d({C}, 4, 1, bias=False)", 1), ("nn.ConvTranspose1d({C}, 3, 2)", 1), ("nn.Conv2d({C}, 4, 3, padding=1)", 1), ("nn.Conv1d({C}, {C}, 1, groups={C})", 1), ("nn.Identity()", 1),
    ("nn.Flatten()", 1), ("nn.PReLU()", 0), ("nn.LayerNorm({L})", 0), ("nn.LayerNorm({L}, elementwise_affine=False)", 0), ("nn.RMSNorm({L})", 0), ("nn.BatchNorm1d({C})", 0), ("nn.BatchNorm2d({C})", 0), ("nn.GroupNorm(1, {C})", 0),
    ("nn.InstanceNorm1d({C})", 0), ("nn.GELU()", 0), ("nn.SiLU()", 0), ("nn.Softmax(-1)", 0), ("nn.Dropout(0.0)", 1), ("nn.MaxPool1d(2, 1)", 1), ("nn.AvgPool1d(2, 1)", 0), ("nn.Upsample(scale_factor=2)", 1), ("nn.Hardswish()", 0),
    ("nn.Softplus()", 0), ("nn.TransformerEncoderLayer({L}, 1, 8, 0.0, batch_first=True)", 0), ("nn.ELU(inplace=True)", 0), ("nn.Unflatten(-1, (2, -1))", 1), ("nn.utils.parametrizations.weight_norm(nn.Linear({L}, 4))", 0),
    ("nn.utils.parametrizations.spectral_norm(nn.Linear({L}, 4))", 0), ("nn.CircularPad1d(1)", 1), ("nn.ZeroPad2d(1)", 1), ("nn.AdaptiveAvgPool1d(2)", 0), ("nn.Tanh()", 0),
)  # fmt: skip
PAIRED_MODULES = (
    ("{v} = {m}({x})[0]", "nn.GRU({L}, 4, batch_first=True)"), ("{v} = {m}({x})[0]", "nn.LSTM({L}, 4)"), ("{v} = {m}({x})[0]", "nn.RNN({L}, 4)"), ("{v} = {m}({x})", "nn.GRUCell({L}, 4)"), ("{v}, {u} = {m}({x})\n{u} = {u} + 0", "nn.LSTMCell({L}, 4)"),
    ("{v} = {m}({x}, {x})[0]", "nn.MultiheadAttention({L}, 1, batch_first=True)"), ("{v} = {m}({x}, {x}, {x}, need_weights=False)[0]", "nn.MultiheadAttention({L}, 1 + ({L} % 2 == 0), batch_first=True)"), ("{v} = {m}({x}, {s})", "nn.Bilinear({L}, {L}, 4)"),
    ("{v} = {m}({x}.argmax(-1))", "nn.Embedding(8, 4)"), ("{v} = {m}({x}) + 0", "nn.RNNCell({L}, 4)"), ("{v}, {u} = {m}({x})\n{u} = {u}[0]", "nn.LSTM({L}, 4, batch_first=True)"), ("{v} = {m}({x}.argmax(-1))", "nn.EmbeddingBag(8, 4, mode='sum')"),
    ("{v} = {m}({x}.argmax(-1)) @ {m}.weight.mT", "nn.Embedding(8, 4, max_norm=0.5)"), ("{v} = {m}({x}) + {m}.running_mean", "nn.BatchNorm1d({L})"), ("{v} = {m}({x}).mT @ {m}.running_var", "nn.BatchNorm1d({C})"),
)  # fmt: skip
"""Calls of modules, and the modules. What an LSTM or RNN cell gives is read once more: whether its own backward reads the very tensor, so
that `retain_grad` sees a gradient of the second order, is the kernel's matter. A CPU's is made of ops, CUDA's LSTM is one."""

_REGIONS = ("", "with maybe_autocast({x}.device.type, enabled=False):\n    ", "with torch.autocast({x}.device.type, enabled=False):\n    ")
"""Where positions meet frequencies: as any code, where the author asks for fp32 if autocast is on, and where the author asks for it."""
_ANGLES = (
    "t{n}[:, None] @ f{n}[None]", "(f{n}[:, None] @ t{n}[None]).mT", "torch.einsum('i,j->ij', t{n}, f{n})", "torch.outer(t{n}, f{n})",
    "t{n}[:, None] * f{n}", "F.linear(t{n}[:, None], f{n}[:, None])", "torch.polar(torch.ones_like(f{n}), torch.outer(t{n}, f{n})).angle()",
)  # fmt: skip
_TURNED = (
    "{v} = turned({x}, a{n})", "{v} = {x} + a{n}.sin()", "{v} = {lin}({x} * a{n}.cos())",
    "{v} = F.scaled_dot_product_attention(turned(3 * {lin}({x}), a{n}), turned(3 * {lin}({x}), a{n}), {x})",
)  # fmt: skip
_PLACES = "t{n} = torch.arange({x}.shape[-2], device={x}.device).float()\n"
_PLACED = (
    ("count_bound", "(t{n} - 3).clamp(min=0)"), ("count_bound", "(3 - t{n}).clamp(max=0)"), ("count_bound", "(t{n}.long() & -2).float()"), ("count_bound", "t{n}.clamp_min(2)"),
    ("count_like", "t{n}.long().type_as({x})"), ("count_like", "torch.full_like(t{n}, 1001.0)"), ("count_like", "{x}.new_full(t{n}.shape, 1001.0)"), ("count_like", "torch.full(t{n}.shape, 1001.0, device={x}.device)"),
    ("count_like", "torch.ones_like(t{n}).cumsum(0)"), ("count_like", "{x}.new_ones(t{n}.shape).cumsum(0)"), ("count_like", "torch.ones_like({x}[..., 0]).flatten()[: len(t{n})].cumsum(0)"),
    ("count_written", "torch.zeros_like(t{n})\np{n}[1:] = t{n}[1:] + 7"), ("count_written", "torch.zeros_like(t{n})\np{n}[:] = 1001.0"), ("count_written", "{x}.new_empty(t{n}.shape)\np{n}.copy_(t{n})"),
    ("count_written", "torch.empty_like(t{n})\np{n}[:] = t{n}"), ("count_written", "torch.empty_like(t{n}).fill_(1001.0)"), ("count_written", "torch.zeros_like(t{n}).scatter_(0, t{n}.long(), t{n})"),
    ("count_lengths", "(({x} > 0).float().flatten(0, -2).norm(p=1, dim=0, keepdim=True)[:, :1] + t{n} * 0).flatten()"),
    ("count_lengths", "torch.zeros(4, device={x}.device).scatter_reduce(0, {x}.flatten().long() % 4, torch.ones_like({x}.flatten()), 'sum')[t{n}.long() % 4]"),
)  # fmt: skip
"""Other ways to get at positions p{n} from t{n}: within one bound, of the shape or dtype of a tensor, written into memory, lengths."""
COUNTS = (
    *(
        ("count_angles", f"{_PLACES}f{{n}} = frequencies({{x}})\n{region}a{{n}} = {angles}\n{use}")
        for region in _REGIONS for angles in _ANGLES for use in _TURNED
    ),
    *(("count_alibi", f"{_PLACES}{{v}} = torch.softmax({{lin}}({{x}}) @ {{x}}.mT - {slope} * ({distance}).abs(), -1) @ {{x}}")
      for slope in (0.5, 0.01) for distance in ("t{n}[None] - t{n}[:, None]", "torch.cdist(t{n}[:, None], t{n}[:, None])")),
    *(("count_alibi", f"{_PLACES}{{v}} = torch.softmax({scores}, -1) @ {{x}}") for scores in (
        "torch.baddbmm(0.5 * t{n}[None, None], {lin}({x}), {x}.mT, beta=1.0, alpha=0.25)", "torch.addmm(0.5 * t{n}, {lin}({x}), {x}.mT)",
    )),
    ("count_mask", "{v} = {x} * (0.37 * ({x} > 0).float().cumsum(-2)).cos()"),
    ("count_mask", "t{n} = F.one_hot({x}.argmax(-1), {x}.shape[-1]).float()\n{v} = {x} + (0.5 * t{n}.cumsum(-2)).sin()"),
    ("count_places", f"{_PLACES}{{v}} = {{x}} + {{lin}}(torch.log2(t{{n}}[:, None].expand(-1, {{x}}.shape[-1]) + 1))"),
    ("count_time", "t{n} = 901.0 + torch.arange({x}.shape[0], device={x}.device)\n{v} = {x} + {lin}((t{n}.view(-1, *[1] * ({x}.dim() - 1)) * frequencies({x})).sin())"),
    ("count_buckets", f"{_PLACES}{{u}} = torch.bucketize(t{{n}}[:, None] - t{{n}}, torch.tensor([-300.0, -20.0, 0.0, 20.0, 300.0], device={{x}}.device))\n{{v}} = torch.softmax(4 * {{x}} @ {{x}}.mT + {{u}}, -1) @ {{x}}"),
    *((tag, f"{_PLACES}p{{n}} = {text}\na{{n}} = p{{n}}[:, None].expand(-1, 32) @ torch.full((32, {{x}}.shape[-1]), 2.0**-5, device={{x}}.device) * frequencies({{x}})\n{use}")
      for tag, text in _PLACED for use in _TURNED),
)  # fmt: skip
"""Whole numbers that fp32 holds, and low formats do not from 257 or 2049 on, on their way to angles, distances, counts and times."""

def _templates(table: tuple[tuple[object, ...], ...]) -> tuple[Template, ...]:
    return tuple(Template(str(row[0]), str(row[1]), len(row) > 2) for row in table)


def _plain_ops() -> tuple[Template, ...]:
    found = [Template(name, text, True) for name in EXACT_UNARY for text in _spelled(name)]
    found += [Template(name, text) for name in SMOOTH_UNARY for text in _spelled(name)]
    for name, guarded in GUARDED_UNARY.items():
        found += [Template(name, f"{{u}} = {guarded}\n{text.replace('{x}', '{u}')}") for text in _spelled(name)]
    found += [Template(name, text, exact) for name, arguments, exact in ARGUED for text in _spelled(name, arguments)]
    for name, exact in BINARY:
        found += [Template(name, text, exact) for text in _spelled(name, "{y}")]
    found += [Template(sign, f"{{v}} = {{x}} {sign} {other}", True) for sign in OPERATORS for other in ("{y}", "{k}")]
    return tuple(found)


PLAIN = (*_plain_ops(), *_templates(WRITTEN))
COUNTED = tuple(tuple(each for each in _templates(COUNTS) if each.tag == tag) for tag in dict.fromkeys(row[0] for row in COUNTS))
"""Those of each tag, angles first: no tag is likelier for having more spellings."""
THEMES: dict[str, tuple[Template, ...]] = {
    "plain": PLAIN,
    "inplace": _templates(INPLACE),
    "control": _templates(CONTROL),
    "checkpoint": _templates(CHECKPOINTS),
    "derivative": _templates(DERIVATIVES),
    "region": _templates(REGIONS),
    "odd": _templates(ODD),
    "range": (*_templates(RANGE), *(each for each in _templates(RANGE) if "checkpoint" in each.tag)),
    "product": tuple(each for each in _templates(WRITTEN) if "{lin}" in each.text or "@" in each.text),
}
"""Kinds of statements; a program leans towards a few of them."""
