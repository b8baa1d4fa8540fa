"""Rows of the op table of kind ALLOW: ops that run in the low format (bf16, fp16), because Tensor Cores make them several times faster."""

from amprewrite.tables.ops.op_row import ALLOW, BOTH, rows

ROWS = (
    *rows(ALLOW, "a matrix product: Tensor Cores accumulate it in fp32", "linear mkldnn_linear", summands=("bias",)),
    *rows(ALLOW, "a matrix product: Tensor Cores accumulate it in fp32",
        "addmm _addmm_activation", "baddbmm", "addbmm", summands=("input", "self")),
    *rows(ALLOW, "a matrix product: Tensor Cores accumulate it in fp32",
        "matmul linalg_matmul", "mm", "bmm", "einsum", "inner", "chain_matmul", "linalg_multi_dot", "tensordot", "bilinear _trilinear"),
    *rows(ALLOW, "its matrix product dwarfs its loss, which is taken in fp32 inside", "linear_cross_entropy"),
    *rows(ALLOW, "a matrix product by groups, accumulated in fp32", "grouped_mm _grouped_mm"),
    *rows(ALLOW, "a matrix product an expert, one after another", "transformers::grouped_mm_fallback"),
    *rows(ALLOW, "a convolution: Tensor Cores accumulate it in fp32",
        "conv1d", "conv2d thnn_conv2d slow_conv_dilated2d _slow_conv2d_forward _conv_depthwise2d",
        "conv3d slow_conv3d slow_conv3d_forward slow_conv_dilated3d conv_depthwise3d", "conv_transpose1d",
        "conv_transpose2d slow_conv_transpose2d", "conv_transpose3d slow_conv_transpose3d", summands=("bias",), unset=("cpu:bf16",)),
    *rows(ALLOW, "a convolution: Tensor Cores accumulate it in fp32",
        "conv_tbc", "convolution _convolution _convolution_mode convolution_overrideable mkldnn_convolution _mps_convolution "
        "_nnpack_spatial_convolution", "cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu",
        "cudnn_convolution_transpose",
        "miopen_convolution miopen_convolution_relu miopen_convolution_add_relu miopen_depthwise_convolution",
        "miopen_convolution_transpose", summands=("bias",)),
    *rows(ALLOW, "a recurrent layer: matrix products at every step", "lstm", by_steps=("cpu",), one_kernel=("cpu:bf16",)),
    *rows(ALLOW, "a recurrent layer: matrix products at every step", "gru", "rnn_tanh", "rnn_relu", by_steps=("cpu",)),
    *rows(ALLOW, "a recurrent layer: matrix products at every step",
        "_cudnn_rnn miopen_rnn", "mkldnn_rnn_layer", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell"),
    *rows(ALLOW, "attention: two matrix products round a softmax in fp32",
        "scaled_dot_product_attention _scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward",
        "_scaled_dot_product_efficient_attention _efficient_attention_forward",
        "_scaled_dot_product_cudnn_attention _cudnn_attention_forward", "multi_head_attention_forward",
        "_native_multi_head_attention _triton_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *rows(ALLOW, "attention: two matrix products round a softmax in fp32", "flex_attention", data=("query", "key", "value"), mixed_on=BOTH),
)  # fmt: skip
