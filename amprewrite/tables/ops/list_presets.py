"""The op lists of two other systems, in amprewrite's op names: TensorFlow's grappler pass for mixed precision, and torch.autocast.

Both are exact copies, quirks included, because users choose these presets to get the behaviour of the other system.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from amprewrite.tables.vocabulary import OpKind


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# TensorFlow ----------------------------------------------------------------------------------------------------------

TF_OPS: dict[str, str] = {
    # types on TensorFlow's allow list
    "MatMul": "linear mm addmm matmul mv addmv inner tensordot chain_matmul linalg_multi_dot rnn_tanh_cell rnn_relu_cell",
    "BatchMatMulV2": "bmm baddbmm addbmm scaled_dot_product_attention multi_head_attention_forward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    "Einsum": "einsum bilinear",
    "Conv2D": "conv1d conv2d conv_tbc convolution cudnn_convolution miopen_convolution",
    "Conv2DBackpropInput": "conv_transpose1d conv_transpose2d cudnn_convolution_transpose miopen_convolution_transpose",
    "Conv3D": "conv3d",
    "Conv3DBackpropInputV2": "conv_transpose3d",
    "CudnnRNNV3": "lstm gru rnn_tanh rnn_relu _cudnn_rnn mkldnn_rnn_layer",
    "LSTMBlockCell": "lstm_cell _thnn_fused_lstm_cell",
    "GRUBlockCell": "gru_cell _thnn_fused_gru_cell",
    "MhaV2": "_native_multi_head_attention _transformer_encoder_layer_fwd",
    # types on TensorFlow's infer list
    "AddV2": "add",
    "Sub": "sub rsub diff softshrink",
    "Mul": "mul outer kron addcmul addcdiv lerp deg2rad rad2deg hardsigmoid hardswish alpha_dropout feature_alpha_dropout",
    "RealDiv": "div",
    "FloorDiv": "floor_divide",
    "AvgPool": "avg_pool1d avg_pool2d",
    "AvgPool3D": "avg_pool3d",
    "Elu": "elu celu",
    "Selu": "selu",
    "Erf": "erf gelu",
    "Erfc": "erfc",
    "FusedBatchNormV3": "batch_norm",
    "LeakyRelu": "leaky_relu prelu rrelu",
    "Log": "log log2 log10",
    "Log1p": "log1p",
    "LogSoftmax": "log_softmax",
    "Prod": "prod",
    "Reciprocal": "reciprocal",
    "Rsqrt": "rsqrt",
    "Sigmoid": "sigmoid silu glu",
    "Softmax": "softmax softmin",
    "Softplus": "softplus log_sigmoid mish",
    "Softsign": "softsign",
    "Sqrt": "sqrt",
    "Square": "square",
    "Tanh": "tanh tanhshrink",
    # types on the deny list in fp16, and on the infer list in bf16. "Mean" lists norms, because TensorFlow computes norms from Mean.
    "Mean": "mean nanmean adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d layer_norm group_norm instance_norm rms_norm",
    "Sum": "sum nansum",
    # types on TensorFlow's deny list
    "Exp": "exp",
    "Expm1": "expm1",
    "L2Loss": "norm linalg_norm linalg_vector_norm frobenius_norm mse_loss",
    "Pow": "pow exp2 float_power ldexp",
    "SparseSoftmaxCrossEntropyWithLogits": "cross_entropy nll_loss",
    # types on TensorFlow's clear list
    "Abs": "abs",
    "ArgMax": "argmax",
    "ArgMin": "argmin",
    "BroadcastTo": "expand expand_as expand_copy broadcast_to broadcast_tensors meshgrid",
    "Ceil": "ceil",
    "ClipByValue": "clamp clamp_min clamp_max hardtanh",
    "ConcatV2": "cat hstack vstack dstack column_stack",
    "DepthToSpace": "pixel_shuffle",
    "EnsureShape": "_assert _assert_async _assert_scalar _assert_tensor_metadata",
    "Equal": "eq",
    "ExpandDims": "unsqueeze unsqueeze_copy atleast_1d atleast_2d atleast_3d",
    "Fill": "full zeros ones eye",
    "Floor": "floor",
    "GatherNd": "gather take take_along_dim index _unsafe_index",
    "GatherV2": "index_select embedding",
    "Greater": "gt",
    "GreaterEqual": "ge",
    "Identity": "clone contiguous positive alias dropout dropout1d dropout2d dropout3d getattr",
    "IsFinite": "isfinite",
    "IsInf": "isinf isneginf isposinf",
    "IsNan": "isnan",
    "Less": "lt",
    "LessEqual": "le",
    "Max": "max amax aminmax adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    "MaxPool": "max_pool1d max_pool2d",
    "MaxPool3D": "max_pool3d",
    "Maximum": "maximum fmax",
    "Min": "min amin",
    "Minimum": "minimum fmin",
    "MirrorPad": "reflection_pad1d reflection_pad2d reflection_pad3d",
    "Neg": "neg",
    "NotEqual": "ne",
    "OneHot": "one_hot",
    "OnesLike": "ones_like",
    "Pack": "stack",
    "PadV2": "pad constant_pad_nd zero_pad2d",
    "Rank": "dim",
    "Relu": "relu",
    "Relu6": "relu6",
    "Reshape": "view view_as view_copy reshape reshape_as unsafe_reshape flatten unflatten ravel",
    "ResizeBilinear": "upsample_bilinear2d",
    "ResizeNearestNeighbor": "interpolate upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    "ReverseV2": "flip fliplr flipud rot90",
    "Round": "round",
    "ScatterNd": "scatter index_put",
    "SelectV2": "where masked_fill",
    "Shape": "size shape",
    "Sign": "sign sgn",
    "Size": "numel",
    "Slice": "narrow narrow_copy slice slice_copy",
    "SpaceToDepth": "pixel_unshuffle",
    "Split": "chunk unsafe_chunk tensor_split hsplit vsplit dsplit",
    "SplitV": "split split_copy unsafe_split split_with_sizes split_with_sizes_copy",
    "Squeeze": "squeeze squeeze_copy",
    "StopGradient": "detach detach_copy",
    "StridedSlice": "getitem select select_copy",
    "Tile": "repeat tile repeat_interleave",
    "TopKV2": "topk sort argsort msort kthvalue median",
    "Transpose": "permute permute_copy transpose transpose_copy t t_copy movedim",
    "Unpack": "unbind unbind_copy",
    "Where": "nonzero argwhere masked_select",
    "ZerosLike": "zeros_like",
}
"""TensorFlow op type → torch ops that do the same, or that TensorFlow would compute by ops of this type. All other torch ops are on none of
TensorFlow's lists, nor are conversions (Cast)."""

_TF_ALLOW = _words("Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 Einsum MatMul BatchMatMulV2")
_TF_ALLOW_CUDA_FP16 = _words("CudnnRNNV3 GRUBlockCell LSTMBlockCell MhaV2")
_TF_INFER = _words(
    "AddV2 AvgPool AvgPool3D Elu Erf Erfc FloorDiv FusedBatchNormV3 LeakyRelu Log Log1p LogSoftmax Mul Prod RealDiv Reciprocal "
    "Selu Sigmoid Softmax Softplus Softsign Sqrt Sub Tanh"
)
_TF_INFER_ONEDNN = _words("Rsqrt Square")
_TF_INFER_BF16 = _TF_INFER_ONEDNN | {"Mean", "Sum"}
_TF_DENY = _words("Exp Expm1 L2Loss Mean Pow SparseSoftmaxCrossEntropyWithLogits Sum")
_TF_CLEAR = _words(
    "Abs ArgMax ArgMin BroadcastTo Ceil ClipByValue ConcatV2 DepthToSpace EnsureShape Equal ExpandDims Fill Floor GatherNd "
    "GatherV2 Greater GreaterEqual Identity IsFinite IsInf IsNan Less LessEqual Max MaxPool MaxPool3D Maximum Min Minimum "
    "MirrorPad Neg NotEqual OnesLike Pack PadV2 Rank Relu Relu6 Reshape ResizeNearestNeighbor ReverseV2 Round SelectV2 "
    "Shape Sign Slice SpaceToDepth Split SplitV Squeeze StopGradient StridedSlice Tile TopKV2 Transpose Unpack Where "
    "ZerosLike"
)
_TF_CLEAR_FP16 = frozenset({"OneHot", "Size"})
_TF_CLEAR_BF16 = frozenset({"ResizeBilinear", "ScatterNd"})


def tf_kinds(narrow: bool, device: str) -> dict[str, OpKind]:
    """Return {op name: kind, such as allow} in TensorFlow's lists: for fp16 if `narrow`, otherwise for bf16. Unlisted ops are missing.

    `device` is "cpu" (oneDNN's lists) or "cuda". For bf16 TensorFlow has only oneDNN's lists, so "cuda" gets the same lists as "cpu".
    """
    bf16 = not narrow
    infer = _TF_INFER | (_TF_INFER_BF16 if bf16 else _TF_INFER_ONEDNN if device == "cpu" else frozenset())
    lists = {
        OpKind.ALLOW: _TF_ALLOW | (_TF_ALLOW_CUDA_FP16 if device == "cuda" and not bf16 else frozenset()),
        OpKind.INFER: infer,
        OpKind.CLEAR: _TF_CLEAR | (_TF_CLEAR_BF16 if bf16 else _TF_CLEAR_FP16),
        OpKind.DENY: _TF_DENY - infer,
    }
    return {op: kind for kind, types in lists.items() for tf_type in types for op in TF_OPS[tf_type].split()}


# torch.autocast ------------------------------------------------------------------------------------------------------

_AUTOCAST_LOW = {
    "cuda": "convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution "
    "cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention flex_attention",
    "cpu": "convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm matmul mm "
    "linalg_vecdot linear addbmm baddbmm bmm mkldnn_rnn_layer _native_multi_head_attention scaled_dot_product_attention "
    "flex_attention",
}
"""By device: ops that torch.autocast registers with the policy lower_precision_fp, so that it casts their inputs to the low format."""

_AUTOCAST_HIGH = {
    "cuda": "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm rms_norm "
    "group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits binary_cross_entropy dist pdist "
    "cdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa prod softmax log_softmax cumprod "
    "cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_sqrth sum norm",
    "cpu": "avg_pool3d binary_cross_entropy grid_sample grid_sampler_2d grid_sampler_3d polar prod quantile nanquantile stft "
    "cdist trace view_as_complex cholesky cholesky_inverse cholesky_solve linalg_inv lu_solve linalg_householder_product ormqr "
    "pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss hinge_embedding_loss poisson_nll_loss "
    "smooth_l1_loss cross_entropy l1_loss huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "ctc_loss kl_div multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn "
    "fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_matrix_rank "
    "linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv_ex linalg_cholesky_ex "
    "linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf lu qr svd triangular_solve fractional_max_pool2d "
    "fractional_max_pool3d adaptive_max_pool3d linalg_qr linalg_svd linalg_eig linalg_eigh linalg_lstsq linalg_matrix_sqrth",
}
"""By device: ops that torch.autocast registers with the policy fp32, fp32_set_opt_dtype or fp32_append_dtype, so that they run in fp32. On
CUDA torch.autocast refuses binary_cross_entropy; the list holds it nevertheless."""

AUTOCAST_PROMOTE: dict[str, frozenset[str]] = {
    "cuda": _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add"),
    "cpu": _words("stack cat index_copy"),
}
"""By device: ops that torch.autocast registers with the policy promote, so that it casts their inputs to the widest dtype among them."""

AUTOCAST_COMPOSITES: dict[str, dict[OpKind, str]] = {
    "cuda": {
        OpKind.ALLOW: "lstm gru rnn_tanh rnn_relu _cudnn_rnn multi_head_attention_forward linear_cross_entropy cov corrcoef",
        OpKind.DENY: "cross_entropy multilabel_soft_margin_loss triplet_margin_with_distance_loss square softmin normalize "
        "local_response_norm pairwise_distance linalg_norm interpolate trapezoid cumulative_trapezoid",
    },
    "cpu": {
        OpKind.ALLOW: "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell multi_head_attention_forward "
        "linear_cross_entropy einsum inner tensordot chain_matmul linalg_multi_dot cov corrcoef",
        OpKind.DENY: "max_unpool1d",
    },
}
"""By device and kind: ops that are one node in captured graphs, but run several ops that torch.autocast has on its lists. The kind is the
kind of the ops that run."""


@cache
def autocast_kinds(device: str) -> Mapping[str, OpKind]:
    """Return {op name: kind, such as allow or deny} in the lists of torch.autocast (torch 2.11 to 2.15) on `device`.

    Devices other than "cpu" have CUDA's lists. An op that is missing from the lists runs in the dtype of its inputs.
    """
    device = device if device == "cpu" else "cuda"
    kinds = dict.fromkeys(_AUTOCAST_LOW[device].split(), OpKind.ALLOW)
    kinds |= dict.fromkeys(_AUTOCAST_HIGH[device].split(), OpKind.DENY)
    for kind, ops in AUTOCAST_COMPOSITES[device].items():
        kinds |= dict.fromkeys(ops.split(), kind)
    return kinds
