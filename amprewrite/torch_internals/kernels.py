"""Kernels that torch offers only under private names: kernels over lists of tensors, and a product of fp8 matrices."""

import torch

copy_tensors = torch._foreach_copy_
"""Copy each tensor of the second list into the tensor at the same position in the first list."""
norms_of_tensors = torch._foreach_norm
"""Return the norm of each tensor of a list, as a list of 0-dim tensors."""
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply the tensors of a list in place by a factor, and set a flag tensor to 1 if any element is not finite."""
scaled_mm = torch._scaled_mm
"""Return the product of two fp8 matrices with their scales. The public `torch.nn.functional.scaled_mm` cannot be used, because Inductor of
torch 2.11 cannot lower it."""
