"""Kernels that torch offers by no public name: over lists of tensors, and for fp8 matrices."""

import torch

copy_tensors = torch._foreach_copy_
"""Copy each tensor of the second list into the tensor at the same place of the first."""
norms_of_tensors = torch._foreach_norm
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply tensors in place by a factor, and set a flag if any value is not finite."""
scaled_mm = torch._scaled_mm
"""The product of two fp8 matrices with their scales. Inductor of torch 2.11 cannot lower the public `torch.nn.functional.scaled_mm`."""
