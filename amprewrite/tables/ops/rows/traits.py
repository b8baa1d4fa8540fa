"""For each trait, a property such as DIVIDES: the ops that have it. `ops/op_lists.py` adds the traits to the rows of the op table."""

from amprewrite.tables.ops.op_row import Trait

_SAME_NUMBERS = "getitem expand expand_as view view_as reshape unsqueeze squeeze transpose permute contiguous clone to type_as float"
_LEVELS = "softmax sigmoid hardsigmoid tanh relu6 erf sgn argmax argmin argsort bool isfinite isinf isnan logical_not"
_KEEPS_ZERO = "leaky_relu elu celu selu softshrink hardshrink dropout dropout1d dropout2d dropout3d rrelu prelu"

TRAITS: dict[Trait, str] = {
    Trait.CONVERTS: "to type type_as float convert_element_type",
    Trait.TAKES_SHAPE_ONLY: "zeros_like ones_like full_like empty_like rand_like randn_like",
    Trait.LIKE_SECOND: "to type_as expand_as view_as reshape_as",
    Trait.READS_BITS: "view view_copy",
    Trait.FRESH: "linear matmul mm bmm addmm baddbmm add sub mul div relu gelu silu tanh sigmoid softmax log_softmax layer_norm rms_norm "
    "group_norm sum mean cross_entropy nll_loss cat scaled_dot_product_attention conv1d conv2d conv3d logsumexp argmax "
    "embedding dropout pow",
    Trait.STOPS_GRADIENT: "detach _get_data_attr",
    Trait.HIDES_WRITES: "_get_data_attr",
    Trait.CHOOSES: "relu amax amin aminmax max min median nanmedian sgn",
    Trait.RUNNING_STATISTICS: "batch_norm instance_norm",
    # traits of ops that build attention masks and scores, or pass them on
    Trait.MAKES_MASK: f"{_SAME_NUMBERS} arange full ones zeros eye full_like ones_like zeros_like scalar_tensor bool int long size flatten "
    "t repeat cat stack flip gather index_select where masked_fill tril triu cumsum diff add sub mul neg floor_divide remainder abs clamp "
    "minimum maximum eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not",
    Trait.PASSES_MASK: f"{_SAME_NUMBERS} slice select repeat",
    Trait.KEEPS_ORDER: "view reshape contiguous flatten",
    Trait.HANDS_LAYOUT_ON: "add sub mul div neg where masked_fill clamp to type type_as float expand unsqueeze",
    Trait.MAKES_SCORES: f"{_SAME_NUMBERS} slice select repeat add sub mul div masked_fill where clamp maximum",
    # traits that say how an op uses a number operand (filler, bound, epsilon) and treats very large and very small values
    Trait.ZERO_MATTERS: "add sub rsub clamp clamp_min maximum div full full_like fill",
    Trait.FILLS: "where masked_fill full full_like fill index_fill scatter constant_pad_nd pad threshold nan_to_num index_put setitem",
    Trait.HOLDS_NUMBERS: "tensor scalar_tensor",
    Trait.BOUNDS: "clamp clamp_min clamp_max hardtanh maximum minimum",
    Trait.LEVELS_BELOW: f"{_LEVELS} relu exp exp2 expm1 softplus elu celu selu gelu silu mish hardswish max amax cummax logsumexp fmax "
    "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    Trait.LEVELS_ABOVE: f"{_LEVELS} min amin cummin fmin softmin",
    Trait.COMPARES: "eq ne lt le gt ge",
    Trait.INVERSE: "rsqrt reciprocal",
    Trait.MAGNIFIES_SMALL: "div mul log",
    Trait.DIVIDES: "div",
    Trait.SCALES: "mul div",
    Trait.EXCHANGES_INFINITIES: "nan_to_num isfinite isinf isnan isposinf isneginf",
    Trait.TAKES_EPSILON: "add sub clamp maximum",
    # traits of ops that draw random numbers or leave memory unset, take logarithms, or return numbers between zero and one
    Trait.DRAWS: "rand rand_like randint_like uniform",
    Trait.DRAWS_NORMAL: "randn randn_like normal",
    Trait.RANDOM: "rand rand_like randn randn_like randint randint_like random bernoulli uniform normal multinomial poisson exponential "
    "geometric cauchy log_normal gumbel_softmax binomial _standard_gamma _sample_dirichlet dropout dropout1d dropout2d dropout3d empty "
    "empty_like empty_strided empty_permuted",
    Trait.UNSET: "empty empty_like empty_strided empty_permuted",
    Trait.LOGARITHM: "log log2 log10 log1p",
    Trait.LOGS_OF_BOTH: "binary_cross_entropy",
    Trait.NEARS_ITS_ENDS: "softmax softmin sigmoid",
    # traits of ops that compute products, rank elements, or occur in polynomials
    Trait.SUMS_LAST_DIM: "linear matmul bmm mm mv dot vdot inner grouped_mm transformers::grouped_mm_fallback",
    Trait.READS_FP8: "linear matmul mm addmm",
    Trait.RANKS: "argmax argmin argsort sort msort topk",
    Trait.ADDS_PRODUCT: "addmm baddbmm addbmm addmv",
    Trait.MULTIPLIES_ALL: "chain_matmul linalg_multi_dot",
    Trait.IN_POLYNOMIALS: "add mul",
    # traits that say how an operand's rounding error changes the result
    Trait.ADDS_UP: "add sub rsub addcmul addcdiv lerp diff",
    Trait.TAKES_AWAY: "sub rsub diff",
    Trait.TAKES_MEAN_AWAY: "layer_norm group_norm batch_norm instance_norm var var_mean std std_mean",
    Trait.TAKES_BATCH_MEAN: "batch_norm",
    Trait.AVERAGES: "sum nansum mean nanmean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    Trait.HAS_STEPS: "sign sgn ceil floor trunc round floor_divide argmax argmin argsort eq ne lt le gt ge isin bool byte char short int "
    "long item tolist",
    Trait.SLOPE_VARIES: "relu relu6 leaky_relu prelu rrelu selu hardtanh hardsigmoid hardswish hardshrink softshrink threshold abs clamp "
    "clamp_min clamp_max maximum minimum fmax fmin max min amax amin aminmax median nanmedian quantile nanquantile kthvalue "
    "mode sort msort topk cummax cummin max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d tanh sigmoid erf erfc softsign",
    Trait.SHARES_OUT: "softmax log_softmax softmin",
    Trait.LOOKS_UP: "embedding embedding_bag",
    Trait.READS_WINDOWS: "avg_pool1d avg_pool2d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d unfold as_strided",
    Trait.ADDS_PATCHES: "fold",
    # traits that say how large whole numbers (positions, lengths, steps) may be in the result; `ir/evidence/counts.py` reads these traits
    Trait.NUMBERS: "arange linspace",
    Trait.TOTALS: "sum nansum prod cumsum cumprod index_add index_reduce scatter_add scatter_reduce segment_reduce trace norm "
    "linalg_norm linalg_vector_norm dot vdot mv addmv linalg_vecdot",
    Trait.WITHIN_ONE: "sin cos tanh erf sign sgn one_hot eye softmax softmin sigmoid",
    Trait.STAYS_BELOW: "remainder fmod bitwise_and clamp",
    # traits of ops that make constant tensors
    Trait.MAKES_ZEROS: "zeros zeros_like",
    Trait.UNIFORM: "zeros zeros_like ones ones_like full full_like",
    # traits of linear ops: multiplying certain operands by a factor multiplies the result by it. For LINEAR_IN_ALL and JOINS, these are
    # all operands; for LINEAR_IN_EACH, either of two; for LINEAR_IN_FIRST, the first
    Trait.LINEAR_IN_ALL: "add sub rsub where masked_fill",
    Trait.JOINS: "cat stack hstack vstack dstack column_stack index_add scatter_add",
    Trait.LINEAR_IN_EACH: "mul linear matmul mm bmm mv dot outer inner einsum kron tensordot conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d",
    Trait.LINEAR_IN_FIRST: "div neg positive sum mean cumsum clone contiguous repeat tile repeat_interleave roll rot90 flip fliplr flipud "
    "tril triu trace gather index index_select take_along_dim masked_select diag_embed diag detach to type type_as float half bfloat16 "
    "convert_element_type getitem view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze permute transpose t movedim "
    "expand expand_as broadcast_to as_strided unfold fold slice narrow select diagonal chunk split split_with_sizes tensor_split unbind "
    "alias",
    # traits of recurrent layers and attention
    Trait.RECURRENT: "lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer",
    Trait.RECURRENT_STEP: "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    Trait.ATTENDS: "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention flex_attention",
    Trait.ATTENDS_AND_PROJECTS: "multi_head_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd",
    # traits about padding: what the op returns for zeros and for other numbers in the padding
    Trait.KEEPS_ZERO: _KEEPS_ZERO,
    Trait.NO_LARGER: f"{_KEEPS_ZERO} relu neg abs tanh sigmoid silu erf gelu mish relu6 hardsigmoid hardswish softsign sin cos atan "
    "tanhshrink sign positive asinh",
    # a trait about padding: whatever the further arguments are, an element of the result depends on one element of the first argument
    Trait.ONE_INPUT: "relu silu gelu mish relu6 hardswish hardsigmoid",
}
"""Trait → names of the ops that have it, separated by spaces."""
