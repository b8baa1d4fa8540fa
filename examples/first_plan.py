"""Plan a model, ask why, override, edit, apply."""

import torch
from torch import nn

import amprewrite

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Softmax(-1))
x = torch.randn(32, 64)

# 1. Plan: nothing is rewritten, nothing is left behind.
plan = amprewrite.plan(model, (x,), dtype="bf16")
print(plan, "\n")

# 2. Ask: about a node, or about a module by its path.
print(plan.explain("softmax"))
print(plan.explain("2"), "\n")

# 3. Override: by op, by module, by node. What changes is one diff away.
careful = amprewrite.plan(model, (x,), dtype="bf16", overrides={"gelu": "deny", "module:3": "fp32"})
print(plan.diff(careful), "\n")

# 4. Edit: colours are yours; casts follow when the plan is applied. A plan is JSON text, so it can be kept beside the model.
edited = amprewrite.plan(model, (x,), dtype="bf16").edit({"layer_norm": "high"})
edited = amprewrite.CastPlan.from_json(edited.to_json())

# 5. Apply.
amp = amprewrite.rewrite(model, plan=edited)
y = amp(x)
print(y.dtype, [str(cast) for cast in amp.plan.casts])
