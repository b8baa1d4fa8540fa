"""The op table against PyTorch itself: its op database, its dispatcher, its kernels."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db, unary_ufuncs
from torch.utils._pytree import tree_leaves, tree_map

from amprewrite.tables.errors import OpListError
from amprewrite.tables.formats import BF16, FP16, LOW_FORMATS, Format
from amprewrite.tables.ops import list_presets
from amprewrite.tables.ops.op_lists import OPS, PRESETS, OpLists, find_op, index_rows, is_inplace, op_lists, op_name, ops_with, with_traits
from amprewrite.tables.ops.op_row import Op, Trait, rows
from amprewrite.tables.vocabulary import OpKind

DEVICES = ("cpu", "cuda")
KIND = OpKind


@functools.cache
def vocabulary_name(opinfo: str) -> str:
    """The vocabulary's name of an OpInfo: "nn.functional.softplus", "linalg.svd", "signal.windows.hann"."""
    bare = opinfo.removeprefix("nn.functional.").removeprefix("torch.ops.aten.").removeprefix("torch.")
    bare = bare.removesuffix(".default").replace("signal.windows.", "signal_").replace(".", "_")
    return op_name(bare)


def opinfos() -> list[Any]:
    """The OpInfos that know fp32."""
    return [info for info in op_db if torch.float32 in info.supported_dtypes("cpu")]


# The table -----------------------------------------------------------------------------------------------------------


def test_every_op_of_pytorchs_database_is_classified() -> None:
    assert not {info.name for info in op_db if vocabulary_name(info.name) not in OPS}


def test_every_row_says_why() -> None:
    assert not [row.name for row in OPS.values() if not row.why or row.why.endswith(".")]


def test_a_trait_of_an_op_without_a_row_fails() -> None:
    with pytest.raises(OpListError, match=r"'expp' is said to be CHOOSES in .*traits.py, but has no row"):
        with_traits([Op("exp", KIND.DENY, "overflows")], {Trait.CHOOSES: "exp expp"})


def test_every_trait_belongs_to_some_op() -> None:
    assert not [trait for trait in Trait if not ops_with(trait)]
    assert ops_with(Trait.CHOOSES, Trait.DRAWS) == ops_with(Trait.CHOOSES) | ops_with(Trait.DRAWS)


def test_a_spelling_on_two_rows_fails() -> None:
    two = [Op("exp", KIND.DENY, "overflows"), Op("grow", KIND.CLEAR, "harmless", spellings=("exp",))]
    with pytest.raises(OpListError, match=r"'exp' stands on the denylist \(row 'exp'\) and on the clearlist \(row 'grow'\)"):
        index_rows(two)


def test_rows_share_what_is_said_once() -> None:
    assert list(rows(KIND.DENY, "why", "norm native_norm", "dist", bounded=True)) == [
        Op("norm", KIND.DENY, "why", spellings=("native_norm",), bounded=True),
        Op("dist", KIND.DENY, "why", bounded=True),
    ]


@pytest.mark.parametrize("field", ["no_kernel", "unset", "mixed_on", "low_backward", "uneven", "by_steps", "one_kernel"])
def test_devices_and_formats_are_spelled_right(field: str) -> None:
    words = {word for row in OPS.values() for word in getattr(row, field)}
    with_format = ("no_kernel", "unset", "one_kernel")
    allowed = {f"{device}:{fmt.name}" for device in DEVICES for fmt in LOW_FORMATS} if field in with_format else set(DEVICES)
    assert words <= allowed


def test_only_denied_ops_are_bounded() -> None:
    """An op of another kind lets low values through anyhow."""
    assert {row.kind for row in OPS.values() if row.bounded} == {KIND.DENY}


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param("view", "view", id="a method name is the name"),
        pytest.param("add_", "add", id="the underscore of an in-place method goes"),
        pytest.param("__add__", "add", id="a dunder is its operator"),
        pytest.param("__radd__", "add", id="a reflected operator that commutes is the operator"),
        pytest.param("__rsub__", "rsub", id="a reflected minus is rsub"),
        pytest.param("__rpow__", "pow", id="a reflected power is a power"),
        pytest.param("__imul__", "mul", id="an in-place dunder is its operator"),
        pytest.param("__truediv__", "div", id="true division is div"),
        pytest.param("__or__", "bitwise_or", id="| is bitwise_or"),
        pytest.param("__getitem__", "getitem", id="indexing is getitem"),
        pytest.param("mT", "t", id="a transposing property is t"),
        pytest.param("absolute", "abs", id="a spelling gives the row's name"),
        pytest.param(operator.add, "add", id="operator.add"),
        pytest.param(operator.iadd, "add", id="operator.iadd"),
        pytest.param(operator.truediv, "div", id="operator.truediv"),
        pytest.param(operator.floordiv, "floor_divide", id="operator.floordiv"),
        pytest.param(operator.mod, "remainder", id="operator.mod"),
        pytest.param(operator.and_, "bitwise_and", id="operator.and_ is not an in-place and"),
        pytest.param(operator.ior, "bitwise_or", id="operator.ior"),
        pytest.param(operator.invert, "bitwise_not", id="operator.invert"),
        pytest.param(operator.matmul, "matmul", id="operator.matmul"),
        pytest.param(operator.getitem, "getitem", id="operator.getitem"),
        pytest.param(operator.setitem, "setitem", id="operator.setitem"),
        pytest.param(operator.not_, "not", id="operator.not_"),
        pytest.param(operator.is_, "is", id="operator.is_"),
        pytest.param(operator.index, "index_of", id="operator.index is not aten::index"),
        pytest.param(getattr, "getattr", id="getattr"),
        pytest.param(torch.add, "add", id="a torch function"),
        pytest.param(torch.relu_, "relu", id="an in-place torch function"),
        pytest.param(torch.concat, "cat", id="an alias of a torch function"),
        pytest.param(torch.special.expit, "sigmoid", id="a special function under its other name"),
        pytest.param(torch.special.i1, "special_i1", id="a special function keeps its prefix"),
        pytest.param(torch.linalg.svd, "linalg_svd", id="a linalg function keeps its prefix"),
        pytest.param(torch.linalg.matmul, "matmul", id="linalg.matmul is matmul"),
        pytest.param(torch.fft.rfft, "fft_rfft", id="an fft function keeps its prefix"),
        pytest.param(torch.masked.softmax, "masked_softmax", id="a masked function is not its plain namesake"),
        pytest.param(torch.sparse.mm, "sparse_mm", id="a sparse function is not its plain namesake"),
        pytest.param(torch.mm, "mm", id="mm, though torch.spmm equals it"),
        pytest.param(torch.spmm, "sparse_mm", id="spmm, though torch.mm equals it"),
        pytest.param(torch.signal.windows.exponential, "signal_exponential", id="a window is not a distribution"),
        pytest.param(torch.distributed.gather, "distributed_gather", id="a collective is not an indexing op"),
        pytest.param(torch.sym_max, "sym_max", id="a function of sizes"),
        pytest.param(torch._assert, "_assert", id="an assertion"),
        pytest.param(F.softmax, "softmax", id="a functional written in Python"),
        pytest.param(F.max_pool2d, "max_pool2d", id="a functional behind boolean_dispatch"),
        pytest.param(F.gelu, "gelu", id="a builtin of torch._C._nn"),
        pytest.param(F.logsigmoid, "log_sigmoid", id="a functional that ATen spells otherwise"),
        pytest.param(F.multi_head_attention_forward, "multi_head_attention_forward", id="attention as a whole"),
        pytest.param(F.interpolate, "interpolate", id="interpolate"),
        pytest.param(torch._VF.lstm, "lstm", id="a builtin of _VF"),
        pytest.param(torch._VF.rnn_tanh, "rnn_tanh", id="another builtin of _VF"),
        pytest.param(torch.Tensor.add_, "add", id="an unbound method"),
        pytest.param(torch.Tensor.__rsub__, "rsub", id="an unbound dunder"),
        pytest.param(torch.Tensor.T.__get__, "t", id="the getter of a property"),  # type: ignore[attr-defined]
        pytest.param(torch.ops.aten.add.Tensor, "add", id="an overload"),
        pytest.param(torch.ops.aten.add_.Tensor, "add", id="an in-place overload"),
        pytest.param(torch.ops.aten.add, "add", id="a packet of overloads"),
        pytest.param(torch.ops.aten._softmax.default, "softmax", id="what softmax decomposes into"),
        pytest.param(torch.ops.aten.native_layer_norm.default, "layer_norm", id="what layer_norm decomposes into"),
        pytest.param(torch.ops.aten.convolution.default, "convolution", id="aten's convolution of any rank"),
        pytest.param(torch.ops.aten._unsafe_view.default, "view", id="aten's unsafe view"),
        pytest.param(torch.ops.higher_order.flex_attention, "flex_attention", id="a higher-order op"),
        pytest.param(torch.ops.prim.device.default, "prim::device", id="an op of another library keeps the library's name"),
        pytest.param(vocabulary_name, "vocabulary_name", id="an unknown thing gives its plain name"),
    ],
)
def test_name(target: Any, name: str) -> None:
    assert op_name(target) == name


def test_a_users_own_linear_is_not_torchs() -> None:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    assert op_name(linear) == f"{__name__}.linear"
    assert find_op(op_name(linear)) is None


def spelled(target: Any) -> str:
    """The same in every process: no address."""
    return str(getattr(target, "__qualname__", target))


@pytest.mark.parametrize(
    "target",
    [
        *("add_", "__iadd__", "__setitem__", "copy_", operator.iadd, operator.setitem, operator.iand),
        *(torch.relu_, torch.Tensor.mul_, torch.nn.init.normal_),
        *(torch.ops.aten.add_.Tensor, torch.ops.aten.add_, torch.ops.aten.add.out),
    ],
    ids=spelled,
)
def test_in_place(target: Any) -> None:
    assert is_inplace(target)


@pytest.mark.parametrize(
    "target",
    [
        *("add", "__add__", "__init__", "__invert__", operator.add, operator.and_, operator.is_, operator.index, operator.inv),
        *(operator.invert, torch.relu, F.relu, getattr),
        *(torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.ops.aten._native_batch_norm_legit.default),
    ],
    ids=spelled,
)
def test_not_in_place(target: Any) -> None:
    assert not is_inplace(target)


# Lists ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", LOW_FORMATS, ids=lambda fmt: fmt.name)
def test_a_preset_names_only_ops_of_the_vocabulary(preset: str, fmt: Format, device: str) -> None:
    lists = op_lists(preset, fmt, device)
    assert not {*lists.kinds, *lists.promote} - set(OPS)
    assert not set(lists.kinds) & lists.promote


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OpListError, match="'O1' is no preset; use one of default, tf, autocast, o2, o3"):
        op_lists("O1", BF16, "cpu")


def test_own_lists_come_back() -> None:
    own = OpLists.from_sets("mine", allow=["linear"])
    assert op_lists(own, BF16, "cpu") is own


def test_lists_are_values() -> None:
    lists = op_lists("default", BF16, "cuda:1")
    assert pickle.loads(pickle.dumps(lists)) == copy.deepcopy(lists) == lists == op_lists("default", BF16, "cuda")
    assert hash(lists) == hash(copy.deepcopy(lists))


@pytest.mark.parametrize(
    ("op", "bf16", "fp16"),
    [
        pytest.param("linear", KIND.ALLOW, KIND.ALLOW, id="a matrix product is always low"),
        pytest.param("softmax", KIND.INTERNAL, KIND.INTERNAL, id="softmax sums in fp32 inside"),
        pytest.param("_log_softmax", KIND.INTERNAL, KIND.INTERNAL, id="a spelling has the kind of its row"),
        pytest.param("sum", KIND.INTERNAL, KIND.DENY, id="a sum may leave fp16's range"),
        pytest.param("square", KIND.INFER, KIND.DENY, id="a square may leave fp16's range"),
        pytest.param("add", KIND.INFER, KIND.INFER, id="an add is low unless a denied op is upstream"),
        pytest.param("reshape", KIND.CLEAR, KIND.CLEAR, id="a reshape is harmless"),
        pytest.param("exp", KIND.DENY, KIND.DENY, id="exp is always high"),
        pytest.param("cross_entropy", KIND.DENY, KIND.DENY, id="a loss is always high"),
        pytest.param("no_such_op", None, None, id="an unknown op is on no list"),
    ],
)
def test_default_kind(op: str, bf16: OpKind | None, fp16: OpKind | None) -> None:
    assert op_lists("default", BF16, "cuda").kind(op) is bf16
    assert op_lists("default", FP16, "cuda").kind(op) is fp16


def test_the_default_allowlist_covers_autocasts_but_for_elementwise_ops() -> None:
    for device, fmt in itertools.product(DEVICES, LOW_FORMATS):
        ours, theirs = op_lists("default", fmt, device), op_lists("autocast", fmt, device)
        high = {op for op, kind in theirs.kinds.items() if kind is KIND.ALLOW and ours.kind(op) is not KIND.ALLOW}
        assert high <= {"prelu", "addr", "cov", "corrcoef", "mv", "addmv", "linalg_vecdot"}, (device, fmt.name)


def test_moving_an_op_moves_only_it() -> None:
    lists = op_lists("default", BF16, "cpu")
    moved = lists.moved("special_softmax", KIND.DENY)
    assert moved.kind("softmax") is KIND.DENY
    assert lists.kind("softmax") is KIND.INTERNAL
    assert {op for op in OPS if moved.kind(op) is not lists.kind(op)} == {"softmax"}


def test_moving_an_op_takes_it_from_the_promoted() -> None:
    assert "cat" not in op_lists("autocast", BF16, "cpu").moved("cat", KIND.DENY).promote


def test_moving_an_unknown_op_suggests_near_ones() -> None:
    with pytest.raises(OpListError, match=r"no op named 'sofmax'; did you mean softmax"):
        op_lists("default", BF16, "cpu").moved("sofmax", KIND.DENY)


def test_sets_make_lists() -> None:
    lists = OpLists.from_sets("mine", allow={"linear"}, infer=["add"], clear=("relu",), deny=["exp"], internal=["softmax"])
    assert [lists.kind(op) for op in ("linear", "add", "relu", "exp", "softmax", "mul")] == [
        KIND.ALLOW,
        KIND.INFER,
        KIND.CLEAR,
        KIND.DENY,
        KIND.INTERNAL,
        None,
    ]


def test_sets_that_share_an_op_are_refused() -> None:
    with pytest.raises(OpListError, match="'exp' stands on the inferlist and on the denylist of 'mine'; keep one"):
        OpLists.from_sets("mine", infer=["exp"], deny=["exp"])


def test_sets_that_share_an_op_under_two_spellings_are_refused() -> None:
    with pytest.raises(OpListError, match=r"'concat' \(a spelling of 'cat'\) stands on the allowlist and on the clearlist"):
        OpLists.from_sets("mine", allow=["cat"], clear=["concat"])


def test_a_set_with_an_unknown_op_is_refused() -> None:
    with pytest.raises(OpListError, match="no op named 'layernorm'; did you mean layer_norm"):
        OpLists.from_sets("mine", deny=["layernorm"])


# TensorFlow's lists --------------------------------------------------------------------------------------------------


def test_every_op_has_one_tensorflow_type() -> None:
    ops = [op for words in list_presets.TF_OPS.values() for op in words.split()]
    assert len(ops) == len(set(ops))


@pytest.mark.parametrize(
    ("op", "cuda_fp16", "cpu_fp16", "bf16"),
    [
        pytest.param("linear", "allow", "allow", "allow", id="MatMul"),
        pytest.param("lstm", "allow", None, None, id="CudnnRNN is on the CUDA list alone"),
        pytest.param("softmax", "infer", "infer", "infer", id="Softmax"),
        pytest.param("batch_norm", "infer", "infer", "infer", id="FusedBatchNorm"),
        pytest.param("rsqrt", None, "infer", "infer", id="Rsqrt is unlisted on CUDA"),
        pytest.param("mean", "deny", "deny", "infer", id="Mean is denied in fp16, infer in bf16"),
        pytest.param("sum", "deny", "deny", "infer", id="Sum is denied in fp16, infer in bf16"),
        pytest.param("exp", "deny", "deny", "deny", id="Exp"),
        pytest.param("pow", "deny", "deny", "deny", id="Pow"),
        pytest.param("cross_entropy", "deny", "deny", "deny", id="SparseSoftmaxCrossEntropyWithLogits"),
        pytest.param("relu", "clear", "clear", "clear", id="Relu"),
        pytest.param("one_hot", "clear", "clear", None, id="OneHot is clear in fp16 alone"),
        pytest.param("upsample_bilinear2d", None, None, "clear", id="ResizeBilinear is clear in bf16 alone"),
        pytest.param("to", None, None, None, id="Cast is unlisted"),
        pytest.param("cumsum", None, None, None, id="Cumsum is unlisted"),
    ],
)
def test_tensorflow_kind(op: str, cuda_fp16: str | None, cpu_fp16: str | None, bf16: str | None) -> None:
    wanted = [None if kind is None else OpKind(kind) for kind in (cuda_fp16, cpu_fp16, bf16, bf16)]
    places = ((FP16, "cuda"), (FP16, "cpu"), (BF16, "cuda"), (BF16, "cpu"))
    assert [op_lists("tf", fmt, device).kind(op) for fmt, device in places] == wanted


def test_tensorflow_lists_have_no_internal_ops() -> None:
    assert KIND.INTERNAL not in op_lists("tf", BF16, "cuda").kinds.values()


# torch.autocast's lists ----------------------------------------------------------------------------------------------


def autocast_ops(device: str) -> set[str]:
    """The ATen names that have an autocast kernel."""
    key = f"Autocast{device.upper()}"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return {
        name.partition("::")[2].partition(".")[0]
        for name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }


ONLY_SOME_VERSIONS = {"rms_norm": ("2.12", "3"), "linalg_matrix_sqrth": ("2.15", "3"), "qr": ("2", "2.15"), "cholesky": ("2", "2.15")}
"""Ops with an autocast kernel from the first version to before the second. The lists have the ops of all versions."""


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_has_the_ops_of_the_dispatcher(device: str) -> None:
    lists = op_lists("autocast", BF16, device)
    composites = {op for ops in list_presets.AUTOCAST_COMPOSITES[device].values() for op in ops.split()}
    higher_order = {"flex_attention"}  # registered by Python, not in the dispatcher's listing
    others = {op for op, (since, before) in ONLY_SOME_VERSIONS.items() if not since <= torch.__version__ < before}
    wanted = {op_name(name) for name in autocast_ops(device)} - {"_cudnn_rnn"}  # of builds for CUDA alone, under ops that the lists have
    assert {*lists.kinds, *lists.promote} - composites - higher_order - others == wanted


AUTOCAST_TESTS = [
    pytest.param("cuda", AutocastTestLists, {KIND.ALLOW: ("torch_fp16", "nn_fp16", "linalg_fp16")}, id="cuda low"),
    pytest.param("cuda", AutocastTestLists, {KIND.DENY: ("torch_fp32", "nn_fp32", "methods_fp32", "banned")}, id="cuda high"),
    pytest.param("cuda", AutocastTestLists, {None: ("torch_need_autocast_promote",)}, id="cuda promote"),
    pytest.param("cpu", AutocastCPUTestLists, {KIND.ALLOW: ("torch_16", "nn_16")}, id="cpu low"),
    pytest.param("cpu", AutocastCPUTestLists, {KIND.DENY: ("torch_fp32", "nn_fp32")}, id="cpu high"),
    pytest.param("cpu", AutocastCPUTestLists, {None: ("torch_need_autocast_promote",)}, id="cpu promote"),
]


@pytest.mark.parametrize(("device", "cases", "wanted"), AUTOCAST_TESTS)
def test_autocast_agrees_with_pytorchs_own_test_lists(
    device: str, cases: Any, wanted: dict[OpKind | None, tuple[str, ...]]
) -> None:
    lists = op_lists("autocast", BF16, device)
    attributes = cases(torch.device("cpu"))
    for kind, groups in wanted.items():
        ops = [op_name(case[0]) for group in groups for case in getattr(attributes, group)]
        assert {op: lists.kind(op) for op in ops} == dict.fromkeys(ops, kind)
        assert kind is not None or set(ops) <= lists.promote


def first_sample(info: Any) -> Any:
    return next(iter(info.sample_inputs("cpu", torch.float32)))


def in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """The values with their floating tensors in `dtype`."""

    def convert(value: Any) -> Any:
        return value.detach().to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tree_map(convert, values)


def float_dtypes(values: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}


FIRST_SAMPLE_HIDES = {"linear_cross_entropy", "cov", "corrcoef", "inner", "tensordot", "einsum", "max_pool3d"}
"""Listed for what they call inside, which their first sample does not call, or whose dtype the result does not have."""


@pytest.mark.long
def test_autocast_does_on_cpu_what_its_lists_say() -> None:
    """fp32 inputs of an allowed op give a low output; bf16 inputs of a denied op give an fp32 output."""
    lists = op_lists("autocast", BF16, "cpu")
    wrong = {}
    for info in opinfos():
        name = vocabulary_name(info.name)
        kind = lists.kind(name)
        if kind is None or info.variant_test_name or name in FIRST_SAMPLE_HIDES:
            continue
        dtype, wanted = (torch.float32, torch.bfloat16) if kind is KIND.ALLOW else (torch.bfloat16, torch.float32)
        sample = first_sample(info)
        arguments = in_dtype((sample.input, sample.args, sample.kwargs), dtype)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                result = info(arguments[0], *arguments[1], **arguments[2])
        except RuntimeError as error:
            wrong[info.name] = str(error)
            continue
        if float_dtypes(result) - {wanted}:
            wrong[info.name] = str(float_dtypes(result))
    assert not wrong


# Facts about kernels -------------------------------------------------------------------------------------------------

NO_GPU_SEEN = {"matmul", "bmm", "addbmm", "baddbmm", "bilinear"}
"""OpInfo grants these bf16 on CUDA only where it sees a GPU."""
TOO_STRICT = {"norm", "broadcast_shapes", "round"} | ({"trace"} if torch.__version__ < "2.13" else set())
"""OpInfo denies these a low kernel: of the first the nuclear norm alone has none, the last works all the same. Before torch 2.13 a CPU
has no low kernel of trace."""
BEYOND_OPINFO = {"local_response_norm", "linalg_matrix_norm"}
"""OpInfo's samples miss the form that has no low kernel."""

WRITTEN_OUT = {"rms_norm"}
"""OpInfo grants these a low format on a CPU, where PyTorch has no kernel: it converts to fp32 and runs several ops."""


def test_missing_low_kernels_are_those_that_opinfo_misses() -> None:
    missing: dict[str, set[str]] = {}
    for info in opinfos():
        found = missing.setdefault(vocabulary_name(info.name), set())
        for device, fmt in itertools.product(DEVICES, LOW_FORMATS):
            backward = info.supported_backward_dtypes(device)
            differentiable = info.supports_autograd and torch.float32 in backward
            if fmt.dtype not in info.supported_dtypes(device) or (differentiable and fmt.dtype not in backward):
                found.add(f"{device}:{fmt.name}")
    for op in NO_GPU_SEEN:
        missing[op].discard("cuda:bf16")
    if torch.__version__ >= "2.14":  # later versions have more kernels than the tables say, and no fewer
        missing = {op: found | set(OPS[op].no_kernel) for op, found in missing.items()}
    wrong = {op: (found, OPS[op].no_kernel) for op, found in missing.items() if found != set(OPS[op].no_kernel)}
    assert set(wrong) <= TOO_STRICT | BEYOND_OPINFO | WRITTEN_OUT, wrong


def test_an_rms_norm_is_written_out_on_a_cpu() -> None:
    """When this fails PyTorch has a kernel, and the row can drop the mark."""
    with torch.profiler.profile() as profile:
        F.rms_norm(torch.ones(4, 8, dtype=torch.bfloat16), (8,))
    assert {"aten::rsqrt", "aten::_to_copy"} <= {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("fmt", LOW_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("avg_pool3d", lambda x: F.avg_pool3d(x[None], 2)),
        ("_upsample_bilinear2d_aa", lambda x: F.interpolate(x, 2, mode="bilinear", antialias=True)),
        ("_upsample_bicubic2d_aa", lambda x: F.interpolate(x, 2, mode="bicubic", antialias=True)),
        ("local_response_norm", lambda x: F.local_response_norm(x, 2)),
        ("linalg_matrix_norm", lambda x: torch.linalg.matrix_norm(x, "nuc")),
        ("cdist", lambda x: torch.cdist(x, x)),
        ("rrelu", lambda x: F.rrelu(x, training=True)),
        ("round", lambda x: x.round(decimals=3)),
    ],
)
def test_a_missing_low_kernel_is_missed_on_cpu(op: str, call: Callable[[torch.Tensor], torch.Tensor], fmt: Format) -> None:
    x = torch.ones(1, 4, 4, 4, dtype=fmt.dtype)
    if f"cpu:{fmt.name}" not in OPS[op].no_kernel:
        assert call(x).dtype is fmt.dtype
        return
    with pytest.raises(RuntimeError, match=r"not implemented|not supported|Low precision"):
        call(x)


@pytest.mark.long
def test_internal_kernels_round_but_once() -> None:
    """Against the same inputs in fp32 the error is one rounding: half an eps, and a little for what is added up twice."""
    errors: dict[str, float] = {}
    for info, fmt in itertools.product(opinfos(), LOW_FORMATS):
        row = OPS[vocabulary_name(info.name)]
        if row.kind is not KIND.INTERNAL or f"cpu:{fmt.name}" in row.no_kernel:
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 4):
            low = sample.input.detach().to(fmt.dtype)
            side = (sample.args, sample.kwargs) if row.data else in_dtype((sample.args, sample.kwargs), fmt.dtype)
            high_side = in_dtype(side, torch.float32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    got = tree_leaves(info(low, *side[0], **side[1]))[0]
                except RuntimeError as refusal:  # torch.norm of a matrix: such a call is kept high when it refuses
                    assert "Low precision dtypes not supported" in str(refusal)
                    continue
                want = tree_leaves(info(low.float(), *high_side[0], **high_side[1]))[0]
            if got.dtype is not fmt.dtype or not want.norm().isfinite() or not got.norm().isfinite():
                continue
            error = (got.double() - want.double()).norm() / (want.double().norm() + 1e-9) / fmt.eps
            errors[info.name] = max(errors.get(info.name, 0.0), error.item())
    assert len(errors) > 40
    assert not {name: error for name, error in errors.items() if error > 0.6}


@pytest.mark.parametrize("fmt", LOW_FORMATS, ids=lambda fmt: fmt.name)
def test_only_marked_kernels_round_by_the_place_of_an_element(fmt: Format) -> None:
    """Kernels take the last elements of a tensor one by one: each must be fp32's result rounded once, as the others are.

    Both paths may call functions of different libraries, which fp32 shows too: that moves few elements.
    """
    torch.manual_seed(0)
    x = (torch.rand(512) * 0.9 + 0.05).to(fmt.dtype)
    uneven: set[str] = set()
    for info in unary_ufuncs:
        row = OPS.get(vocabulary_name(info.name))
        if row is None or row.kind is KIND.DENY or not {fmt.dtype, torch.float32} <= set(info.supported_dtypes("cpu")):
            continue
        named, _ = info.sample_kwargs("cpu", fmt.dtype, x)
        together = info(x, **named)
        if info.name.startswith("_refs") or together.dtype is not fmt.dtype:
            continue  # a reference in Python, or a result without rounding
        alone = torch.cat([info(each, **named) for each in x.split(1)])
        differ = (together != alone) & ~alone.isnan()
        if differ.float().mean() > 0.02:
            uneven.add(row.name)
    assert uneven == {row.name for row in OPS.values() if "cpu" in row.uneven}


def test_a_mean_does_not_overflow_on_the_way() -> None:
    assert torch.full((1000, 1000), 100.0).half().mean() == 100


SIDES: dict[str, Callable[..., torch.Tensor]] = {
    "layer_norm": lambda x, weight, bias, mean, var: F.layer_norm(x.mT, (6,), weight, bias).mT,
    "group_norm": lambda x, weight, bias, mean, var: F.group_norm(x, 2, weight, bias),
    "batch_norm": lambda x, weight, bias, mean, var: F.batch_norm(x, mean.clone(), var.clone(), weight, bias, training=True),
    "instance_norm": lambda x, weight, bias, mean, var: F.instance_norm(x, mean.clone(), var.clone(), weight, bias),
}


def test_every_op_that_mixes_on_cpu_is_tried() -> None:
    mixing = {row.name for row in OPS.values() if row.data and "cpu" in row.mixed_on}
    assert mixing == {*SIDES, "flex_attention"}  # whose fp32 extras are read by the user's own score_mod


@pytest.mark.parametrize("fmt", LOW_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("op", SIDES)
def test_low_data_mixes_with_fp32_side_arguments(op: str, fmt: Format) -> None:
    torch.manual_seed(0)
    data = torch.randn(4, 6, 5).to(fmt.dtype)
    sides = [torch.rand(6) + 0.5, torch.randn(6), torch.randn(6), torch.rand(6) + 0.5]
    grad = torch.randn(4, 6, 5).to(fmt.dtype)
    results = []
    for x in (data.clone().requires_grad_(), data.float().requires_grad_()):
        weight, bias = (side.clone().requires_grad_() for side in sides[:2])
        out = SIDES[op](x, weight, bias, *sides[2:])
        assert out.dtype is x.dtype
        out.backward(grad.to(out.dtype))
        assert weight.grad is not None and weight.grad.dtype is torch.float32
        results.append((out, x.grad, weight.grad))
    checked = results if "cpu" not in OPS[op].low_backward else [result[:2] for result in results]
    for got, want in zip(*checked, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=0, atol=fmt.eps * want.abs().max().item())


ROW = torch.arange(8).repeat(500)
CENTRE, CUBE = torch.full((1, 40, 40, 2), 0.3), torch.full((1, 12, 12, 12, 3), 0.3)

GATHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda weight: F.layer_norm(torch.ones(4000, 16, dtype=weight.dtype), (16,), None, weight[0]),
    "group_norm": lambda weight: F.group_norm(torch.ones(4000, 16, dtype=weight.dtype), 4, weight[1], weight[0]),
    "batch_norm": lambda weight: F.batch_norm(torch.ones(4000, 16, dtype=weight.dtype), None, None, None, weight[0], True),
    "rms_norm": lambda weight: F.rms_norm(torch.ones(4000, 16, dtype=weight.dtype), (16,), weight[0]),
    "embedding": lambda weight: F.embedding(ROW, weight),
    "embedding_bag": lambda weight: F.embedding_bag(ROW.view(-1, 4), weight, mode="sum"),
    "take": lambda weight: weight.take(ROW),
    "getitem": lambda weight: weight[ROW],
    "index": lambda weight: torch.ops.aten.index.Tensor(weight, [ROW]),
    "_unsafe_index": lambda weight: torch.ops.aten._unsafe_index.Tensor(weight, [ROW]),
    "gather": lambda weight: weight.gather(0, ROW[:, None].expand(4000, 16)),
    "index_select": lambda weight: weight.view(2, 4, 4, 4).index_select(2, ROW % 4),
    "repeat": lambda weight: weight.repeat(500, 1),
    "expand": lambda weight: weight.expand(500, 8, 16),
    "add": lambda weight: torch.zeros(4000, 16, dtype=weight.dtype) + weight[0],
    "prelu": lambda weight: F.prelu(torch.full((4000, 16), -1.0, dtype=weight.dtype), weight[0]),
    "linear": lambda weight: F.linear(torch.ones(4000, 16, dtype=weight.dtype), weight),
    "conv1d": lambda weight: F.conv1d(torch.ones(1, 16, 4000, dtype=weight.dtype), weight[:, :, None]),
    "interpolate": lambda weight: F.interpolate(weight[None], scale_factor=500.0, mode="linear"),
    "replication_pad1d": lambda weight: F.pad(weight, (200, 200), mode="replicate"),
    "replication_pad2d": lambda weight: F.pad(weight[None], (20, 20, 20, 20), mode="replicate"),
    "replication_pad3d": lambda weight: F.pad(weight.view(1, 8, 4, 4), (9, 9, 9, 9, 9, 9), mode="replicate"),
    "reflection_pad2d": lambda weight: F.pad(weight[None], (15, 15, 7, 7), mode="reflect"),
    "grid_sample": lambda weight: F.grid_sample(weight[None, None], CENTRE.to(weight.dtype), align_corners=False),
    "grid_sampler_2d": lambda weight: torch.grid_sampler_2d(weight[None, None], CENTRE.to(weight.dtype), 0, 0, False),
    "grid_sampler_3d": lambda weight: torch.grid_sampler_3d(weight.view(1, 8, 4, 2, 2), CUBE.to(weight.dtype), 0, 0, False),
    "unfold": lambda weight: F.unfold(weight.repeat(8, 3)[None, None], 91, padding=45),
    "as_strided": lambda weight: weight.repeat(1, 64).as_strided((4000, 4000), (1, 1)),
    "avg_pool1d": lambda weight: F.avg_pool1d(weight.repeat(1, 40).view(1, 5120), 1000, 1),
    "avg_pool2d": lambda weight: F.avg_pool2d(weight.repeat(8, 4)[None], 31, 1, 15),
    "max_pool1d": lambda weight: F.max_pool1d(F.pad(weight, (400, 400)), 401, 1),
    "max_pool2d": lambda weight: F.max_pool2d(F.pad(weight[None], (100, 100, 100, 100)), 101, 1),
    "max_pool3d": lambda weight: F.max_pool3d(F.pad(weight.view(1, 8, 4, 4), (10, 10, 10, 10, 10, 10)), 15, 1),
    "adaptive_avg_pool1d": lambda weight: F.adaptive_avg_pool1d(weight, 4000),
    "adaptive_avg_pool2d": lambda weight: F.adaptive_avg_pool2d(weight[None], 200),
    "adaptive_avg_pool3d": lambda weight: F.adaptive_avg_pool3d(weight.view(1, 2, 4, 4, 4), 40),
    "adaptive_max_pool1d": lambda weight: F.adaptive_max_pool1d(weight, 4000),
    "adaptive_max_pool2d": lambda weight: F.adaptive_max_pool2d(weight[None], 200),
    "adaptive_max_pool3d": lambda weight: F.adaptive_max_pool3d(weight.view(1, 2, 4, 4, 4), 40),
}


def test_every_op_that_adds_up_gradients_in_low_is_tried() -> None:
    assert {row.name for row in OPS.values() if "cpu" in row.low_backward} <= set(GATHERS)


@pytest.mark.parametrize("fmt", LOW_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("op", GATHERS)
def test_only_some_kernels_add_up_gradients_in_low(op: str, fmt: Format) -> None:
    """Thousands of terms for each weight: summed in fp32 they are rounded once, in low they drown.

    When this fails for a row with `low_backward`, PyTorch has mended its kernel, and the row can drop the mark.
    """
    torch.manual_seed(0)
    weight = torch.randn(8, 16).to(fmt.dtype)
    low, high = weight.clone().requires_grad_(), weight.float().requires_grad_()
    out, want = GATHERS[op](low), GATHERS[op](high)
    grad = torch.rand(out.shape).to(fmt.dtype)
    out.backward(grad)
    want.backward(grad.float())
    assert low.grad is not None and high.grad is not None
    error = (low.grad.float() - high.grad).norm() / high.grad.norm() / fmt.eps
    assert error > 1.2 if "cpu" in OPS[op].low_backward else error < 0.6


PROMOTE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{op: getattr(torch, op) for op in ("add", "sub", "rsub", "mul", "div", "kron", "maximum", "minimum", "fmax", "fmin")},
    **{op: getattr(torch, op) for op in ("clamp_min", "clamp_max", "copysign", "fmod", "remainder")},
    "outer": lambda a, b: torch.outer(a[0], b[0]),
    "addcmul": lambda a, b: torch.addcmul(a, b, a) + torch.addcmul(a, a, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a) + torch.addcdiv(a, a, b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp": lambda a, b: torch.clamp(a, min=b, max=b + 1),
    "cat": lambda a, b: torch.cat([a, b]),
    "_chunk_cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "hstack": lambda a, b: torch.hstack([a, b]),
    "vstack": lambda a, b: torch.vstack([a, b]),
    "dstack": lambda a, b: torch.dstack([a, b]),
    "column_stack": lambda a, b: torch.column_stack([a, b]),
}


def test_every_op_that_promotes_is_tried() -> None:
    assert {row.name for row in OPS.values() if row.promotes} == set(PROMOTE)


@pytest.mark.parametrize("fmt", LOW_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("low_first", [True, False], ids=["low first", "low second"])
@pytest.mark.parametrize("op", PROMOTE)
def test_mixed_operands_are_promoted(op: str, low_first: bool, fmt: Format) -> None:
    torch.manual_seed(0)
    low, high = torch.rand(3, 4).add(0.5).to(fmt.dtype).requires_grad_(), torch.rand(3, 4).add(0.5).requires_grad_()
    out = PROMOTE[op](low, high) if low_first else PROMOTE[op](high, low)
    want = PROMOTE[op](low.float(), high) if low_first else PROMOTE[op](high, low.float())
    assert out.dtype is torch.float32
    assert torch.equal(out, want)
    out.sum().backward()
    assert low.grad is None or low.grad.dtype is fmt.dtype
    assert high.grad is None or high.grad.dtype is torch.float32


@pytest.mark.parametrize("op", ["lerp", "prelu", "bilinear", "linear", "matmul", "conv1d", "index_copy", "scatter_add", "dot"])
def test_other_mixed_operands_are_refused(op: str) -> None:
    """Why these rows do not promote: the kernel wants one dtype."""
    a, b = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "lerp": lambda: torch.lerp(a, b, 0.5),
        "prelu": lambda: F.prelu(a, b[0]),
        "bilinear": lambda: F.bilinear(a, a, torch.ones(2, 4, 4)),
        "linear": lambda: F.linear(a, b),
        "matmul": lambda: a @ b,
        "conv1d": lambda: F.conv1d(a, torch.ones(4, 4, 1)),
        "index_copy": lambda: a.index_copy(0, torch.arange(4), b),
        "scatter_add": lambda: a.scatter_add(0, torch.zeros(4, 4, dtype=torch.int64), b),
        "dot": lambda: torch.dot(a[0], b[0]),
    }
    assert not OPS[op].promotes
    with pytest.raises((RuntimeError, ValueError)):
        calls[op]()
