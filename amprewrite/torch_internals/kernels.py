"""Kernels for which torch has no public function: over lists of tensors, and of fp8 matrices."""

import torch

copy_tensors = torch._foreach_copy_
"""Copy each tensor of the second list into that of the first."""
norms_of_tensors = torch._foreach_norm
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply tensors in place by a factor, and set a flag if one is not finite."""
scaled_mm = torch._scaled_mm
"""The product of two matrices in fp8 with their scales; `torch.nn.functional.scaled_mm` has no lowering in inductor of torch 2.11."""
