# ruff: noqa: E501 (the replaced texts stand as they are in the code)
"""Known bugs put back, one at a time, into a copy of the package: does the fuzzer report each?

    python -m tests.fuzz.mutants --minutes 10            # all; a table, and mutants.jsonl in the folder of --out
    python -m tests.fuzz.mutants --only stale-weights --minutes 3
    python -m tests.fuzz.mutants --prove                 # is the smallest program of each (proofs.py) wrong with it, and right without?

A mutant is a few replacements of text. One whose text is not in the code any more is an error, and has to be written anew. A finding
counts if the same seed gives none with the code as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LOOK = "amprewrite/runtime/captured/look_ahead.py"


class MutantError(Exception):
    """A mutant does not fit the code."""


@dataclass(frozen=True)
class Mutant:
    """`edits` are (file, text, replacement); `kinds` of cases that can show it, the likeliest first.

    With --likely only cases whose description has all the words of `having` are run: the same findings in less time.
    """

    name: str
    bug: str
    kinds: tuple[str, ...]
    having: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...]

    def apply(self, root: Path) -> None:
        """Edit the copy of the package at `root`. MutantError if a text is not there exactly once."""
        for file, old, new in self.edits:
            path = root / file
            text = path.read_text() if path.exists() else ""
            if text.count(old) != 1:
                raise MutantError(f"{self.name}: {file} has {text.count(old)} times {old!r}; write this mutant for the code as it is now")
            path.write_text(text.replace(old, new))


MUTANTS = (
    Mutant(
        "stale-weights", "low copies outlive a call and trust version counters", ("states",), (),
        (("amprewrite/graphs/fx/weights/weight_cache.py", "        return own or self._shared\n", '        return own or self._shared or self.__dict__.setdefault("forever", Block("mutant"))\n'),
         ("amprewrite/runtime/session.py", "        self.cache.look(self.weight_names)\n", "        pass\n")),
    ),
    Mutant(
        "stale-step-copies", "cache_weights='step' does not hear of steps that count no version", ("states",), ("'cache_weights', 'step'",),
        (("amprewrite/graphs/fx/weights/step_listeners.py", "                method(optimizer)\n", "                pass\n"),
         ("amprewrite/runtime/session.py", "        self.cache.look(self.weight_names)\n", "        pass\n")),
    ),
    Mutant(
        "scale-without-optimizer", "a dynamic loss scale is used though no optimizer brings it down", ("programs",), ("'fp16'", "('grad',)"),
        (("amprewrite/runtime/training/forward_scale.py", "        if known or look():\n", "        if True:\n"),),
    ),
    Mutant(
        "two-results-two-scales", "a gradient enters by an fp32 result with another scale than it is divided by", ("programs",), ("'loss_scale', 8",),
        (("passes/apply/scale_loss.py", "            if value in outside or value.op == \"get_attr\" or not differentiable(example_value(value)):",
          "            if value in outside or value.op == \"get_attr\" or not differentiable(example_value(value)) or CAST not in value.meta:"),),
    ),
    Mutant(
        "clipping-hides-overflow", "what left the graph non-finite is forgotten once the loop clips it away", ("states",), ("'fp16'", "'value'", "net='Single'"),
        (("amprewrite/runtime/training/training.py", "                note.ended(share)\n        if self.adopt and",
          "                pass\n        if False and"),),
    ),
    Mutant(
        "closure-unguarded", "the first step of a closure loop is not guarded", ("states",), ('closure', "'fp16'"),
        (("amprewrite/runtime/training/forward_scale.py", "        if known or look():\n", "        if True:\n"),
         ("amprewrite/runtime/training/training.py", "            guard_of(optimizer).resume()\n        learns", "            guard_of(optimizer).resume()\n        _BEFORE_STEPS.add(self._adopt)\n        learns"),
         ("amprewrite/runtime/training/training.py", "        if self.adopt and self.loss_scale.enabled:\n            _BEFORE_STEPS.add(self._adopt)\n", "")),
    ),
    Mutant(
        "write-to-input-inside", "a write in place to an input is not on the path of its low readers", ("programs", "states"), ('inplace', 'break', "'fp16'"),
        (("passes/apply/scale_loss.py", "        if node.op == \"placeholder\" or LEAVES in node.meta or apart or part or hook or writes:",
          "        if node.op == \"placeholder\" or LEAVES in node.meta or apart or part or hook:"),
         ("amprewrite/graphs/fx/read/leaving.py", "            found |= (self.results & self.written) | (self.inputs & self.written) | self.same\n", "            found |= (self.results & self.written) | self.same\n")),
    ),
    Mutant(
        "bodies-untold", "products in loops, conditions and autograd Functions stay fp32 without a word", ("programs",), ('while_loop', "'bf16'", 'heavy'),
        (("passes/driver.py", "    for node, name in inner_graphs(captured.module):\n        if name in bodies:\n            continue\n",
          "    for node, name in ():\n"),),
    ),
    Mutant(
        "returned-beside-path", "what is returned and read is an fp32 copy beside the path", ("programs",), (),
        (("passes/__init__.py", "    MarkLeaving(),  #", "    #"),),
    ),
    Mutant(
        "results-lose-memory", "results that share memory leave by a cast each", ("programs",), (".view", "linear"),
        (("amprewrite/graphs/fx/read/leaving.py", "        found = self.several | (self.results & self.inputs) | self.written_inside\n        if with_gradients:", "        found: set[int] = set()\n        if False:"),),
    ),
    Mutant(
        "gradients-taken-inside", "torch.autograd.grad that is captured inside forward sees one of two copies, and is scaled", ("programs",), ('autograd_grad', "traced=True"),
        (("amprewrite/graphs/fx/read/leaving.py", "for node in dict.fromkeys((*_results(graph), *asked)):", "for node in dict.fromkeys(_results(graph)):"),
         ("amprewrite/runtime/captured/graph_rewriter.py", "if captured.problem.scale_loss and takes_gradients(module.graph):", "if False:")),
    ),
    Mutant(
        "forces-scaled", "gradients that a forward takes between its graphs keep the loss scale and overflow", ("states",), ("net='Forces'", "'fp16'"),
        (("amprewrite/runtime/training/forward_scale.py", "            self._set(not self.under_way and (kept or self.static + taken + (not further) > 1))\n", "            self._set(True)\n"),),
    ),
    Mutant(
        "effects-twice", "a call that fails in capture runs again from its start", ("programs",), ('broken', 'count'),
        (("amprewrite/runtime/compiler/dynamo.py", "            if not whole:  # Dynamo refuses this setting together with fail_on_recompile_limit_hit, which the user may have set\n", "            if False:\n"),
         ("amprewrite/runtime/session.py", "            if has_begun(error, entry.function):", "            if False:")),
    ),
    Mutant(
        "old-decisions", "decisions from weights at capture outlive those weights", ("states",), ('tiny=True', "'fp16'"),
        (("amprewrite/runtime/weights/weight_reads.py", "        return now\n", "        return False\n"),),
    ),
    Mutant(
        "bits-of-low-values", "x.view(torch.int32) reads the bits of a low value", ("programs",), ('bits', 'linear'),
        (("amprewrite/tables/ops/rows/traits.py", '    Trait.READS_BITS: "view view_copy",\n', ""),),
    ),
    Mutant(
        "no-parameters", "fp16 with gradients asks a model without parameters for their device", ("programs",), ("'fp16'",),
        (("amprewrite/runtime/training/training.py", "self.gate.snapshot(device,", "self.gate.snapshot(next(iter(self.root.parameters())).device,"),),
    ),
    Mutant(
        "checkpoint-looks-save", "a look at first calls saves tensors into a checkpoint's list", ("programs",), ('checkpoint_sequential', "('grad', 'grad')", "'fp16'"),
        ((LOOK, "unselective(), unhooked(), gradients:\n", "unselective(), torch.enable_grad():\n"),
         (LOOK, "        if value.requires_grad:\n", "        if value.requires_grad and self.differentiates:\n")),
    ),
    Mutant(
        "hooks-called-twice", "a look at a graph with torch.autograd.grad calls the hooks of its inputs", ("programs",), ("large_grad", "traced=True", "'fp16'"),
        ((LOOK, "        if value.requires_grad:\n", "        if value.requires_grad and not self.differentiates:\n"),),
    ),
    Mutant(
        "inner-results-unseen", "no range is known of what an inner checkpoint gives", ("programs",), ("checkpoint(lambda t: checkpoint(", "'fp16'", "'o2'"),
        (("amprewrite/graphs/fx/run/observer.py", "vertex.pinned[1] is Reason.TRANSFORMED", "vertex.pinned[1] in (Reason.OPAQUE, Reason.TRANSFORMED)"),),
    ),
    Mutant(
        "unread-result-low", "what nobody reads overflows in a body, and gradients are zero times infinity", ("programs",), ("_ = scan(", "'fp16'"),
        (("amprewrite/graphs/fx/read/bodies.py", "    return {inner for inner in body.graph.nodes if inner not in reached and inner.op.startswith(\"call\")}", "    return set()"),),
    ),
    Mutant(
        "hidden-overflow", "what overflows and is made finite again is taken for right", ("programs",), ("nan_to_num(F.linear(", "'fp16'"),
        ((LOOK, "any(dangers(self.captured, self.plan, seen))", "not finite"),),
    ),
    Mutant(
        "overflow-refused", "an op that refuses an overflowed value ends the call", ("programs",), ("large_refused", "'fp16'"),
        (("amprewrite/graphs/fx/run/observer.py", "value.amax * (room if graph[name].role == \"op\" else 1) > end", "value.amax > 1e30"),),
    ),
    Mutant(
        "closure-early", "a closure runs before its step, which may move the weights first", ("states",), ("'Ahead'", "fp16"),
        (("amprewrite/runtime/training/optimizers/closures.py", "    first = calls_closure_first(", "    first = True or calls_closure_first("),),
    ),
    Mutant(
        "parameter-written-twice", "a look at a first call writes parameters, and the call writes them again", ("programs",), ("large_parameter", "'fp16'"),
        ((LOOK, "self._copy(value, place in self.written)", "self._copy(value, place in self.written and not isinstance(value, torch.nn.Parameter))"),),
    ),
    Mutant(
        "hidden-data-write", "a backward reads a copy of what is written through .data later", ("programs",), ("'data'",),
        (("amprewrite/graphs/fx/read/aliasing.py", "    hidden = _hidden_writes(facts) if training and writes else {}\n", "    hidden: dict[int, int] = {}\n"),),
    ),
    Mutant(
        "checkpoint-result-written", "a write to a checkpoint's low result goes to a copy", ("programs",), ('checkpoint(', 'inplace'),
        (("passes/driver.py", "    if not apart and not _written_outside(captured, _results_of(captured, node)):\n", "    if not apart:\n"),
         ("passes/__init__.py", "    MarkLeaving(),  #", "    #")),
    ),
    Mutant(
        "number-clamped", "a number beyond fp16's range is taken for a mask: what it makes is clamped, and finite", ("programs",), ('large', "'fp16'"),
        (("amprewrite/graphs/mask_rules.py", "not (masks or beside):", "not (far or masks or beside):"),
         ("amprewrite/graphs/mask_rules.py", "        return self.is_mask(value) or self.reaches_softmax(value)\n", "        return True\n")),
    ),
    Mutant(
        "data-clamped", "data beside fp32's lowest number is taken for a mask: what is computed with it is clamped, and finite", ("programs",), ("finfo", "'fp16'"),
        (("amprewrite/graphs/mask_rules.py", "        return self.is_mask(value) or self.reaches_softmax(value)\n", "        return True\n"),),
    ),
    Mutant(
        "mask-computed-with", "a number that masks becomes the end of fp16's range where it is computed with, and the result is finite", ("programs",), ("large_mask", "'fp16'"),
        (("amprewrite/graphs/fx/flow/far_numbers.py", "        if not sides or size <= self.low.max:\n", "        if True:\n"),),
    ),
    Mutant(
        "two-nodes-one-name", "an op takes the name of what comes into its graph, which is lost", ("programs",), ('checkpoint(', ' * self.w'),
        (("amprewrite/graphs/fx/read/names.py", "        while name in taken or (name in given and name != base):\n", "        while False:\n"),),
    ),
    Mutant(
        "small-gradients-flushed", "backward code of the user runs in fp16 on gradients that are not scaled", ("programs",), ("Bounded.apply", "4194304.0"),
        (("passes/driver.py", "        if reason is not None:\n", "        if False:\n"),),
    ),
    Mutant(
        "backward-taken-for-linear", "a backward that is not linear gets gradients scaled", ("programs",), ("Bounded.apply", "'fp16'"),
        (("amprewrite/graphs/fx/read/bodies.py", "        return not _backward_is_linear(node)\n", "        return False\n"),),
    ),
    Mutant(
        "nested-bodies-unknowing", "a first call overflows in a checkpoint inside another, whose body is decided anew without the ranges", ("programs",), ('nested_checkpoint', "'fp16'"),
        ((LOOK, "        for each in captured.with_parts():\n", "        for each in (captured, *captured.parts.values()):\n"),),
    ),
    Mutant(
        "reentrant-on-the-past", "a reentrant checkpoint recomputes on graphs that were there before an overflow", ("programs",), ('use_reentrant=True) * 1e6, use_reentrant=True)', "'fp16'", 'granularity'),
        (("amprewrite/runtime/ambient/past.py", " or not saved_tensors_are_hooked():", ":"),
         ("amprewrite/runtime/ambient/past.py", "    return None if isinstance(node, CheckpointFunction._backward_cls) else node  # type: ignore[attr-defined]\n", "    return node\n")),
    ),
    Mutant(
        "export-unseen", "export_program looks at no values: what overflows on its inputs is not finite", ("programs",), ('export', "'fp16'", "large"),
        ((LOOK, "    if not worth_watching(captured.problem) or", "    if True or not worth_watching(captured.problem) or"),),
    ),
    Mutant(
        "verify-without-hooks", "verify reads a graph whose tensor hooks stand as they were captured", ("programs",), ('verify', 'hook'),
        (("passes/driver.py", "    run_passes(NORMALISE, reading,", "    run_passes(NORMALISE if pad is not None else NORMALISE[1:], reading,"),),
    ),
    Mutant(
        "functorch-storage", "torch.func beside a write in place leaves the whole graph fp32", ("programs",), ('func_', 'inplace'),
        (("amprewrite/graphs/fx/node_facts.py", "        while is_wrapped_by_transform(tensor):\n            tensor = torch._C._functorch.get_unwrapped(tensor)\n", ""),),
    ),
    Mutant(
        "file-unsorted", "an ONNX file whose nodes are not in order is refused, though it runs", ("files",), ("shuffled=True",),
        (("amprewrite/graphs/onnx/read/load.py", "    sort_nodes(model)\n", ""),),
    ),
    Mutant(
        "positions-rounded", "products of positions run low, also where the model switches autocast off if it is on: angles are wrong beyond 256", ("programs",), ("count_angles",),
        (("amprewrite/ir/evidence/counts.py", "text = _counted(node, counts, summed) or (", "text = \"\" or ("),
         ("amprewrite/runtime/compiler/dynamo.py", "Listener(failed), reporting, ", "Listener(failed), ")),
    ),
    Mutant(
        "early-rounding", "values that no product has rounded are rounded in front of differences and norms", ("programs",), ("offset",),
        (("passes/__init__.py", "RepaintSmallSteps(), RepaintAsAutocast(), ", "RepaintSmallSteps(), "),),
    ),
    Mutant(
        "forgotten-offset", "a stream loses the offset of its input at its second branch", ("programs",), ("stream",),
        (("amprewrite/ir/held_wide.py", "(Held.EXACT in found and node.op", "(Held.EXACT in found and node.op not in SUMS and node.op"),),
    ),
    Mutant(
        "magnified-rounding", "what torch.autocast holds in fp32 behind a product is rounded before it is taken from a number", ("programs",), ("magnified",),
        (("amprewrite/ir/held_wide.py", "return Held.PLAIN if bent or node.kind", "return Held.PLAIN if node.kind"),
         ("passes/repaint/repaint_as_autocast.py", "        if node.op in AWAY | PATCHES:\n            return True\n", "")),
    ),
    Mutant(
        "rounded-shares", "shares are rounded in front of a loss of probabilities", ("programs",), ("shares",),
        (("passes/__init__.py", "RepaintAsAutocast(), RepaintShares())", "RepaintAsAutocast())"),),
    ),
    Mutant(
        "added-up-low", "the gradients of many readers of one low copy are added up in the low format", ("programs",), ("many_readers",),
        (("passes/apply/spread_copies.py", "        for copy in copies:\n", "        for copy in ():\n"),),
    ),
    Mutant(
        "sums-low", "kernels that add up gradients in the low format run low in training", ("programs",), ("many_rows",),
        (("amprewrite/graphs/fx/flow/kernel_pins.py", "    sums = device in fact.row.low_backward and", "    sums = False and"),),
    ),
    Mutant(
        "kinks-rounded", "rounded learnt values choose where gradients go", ("programs",), ("kink",),
        (("passes/repaint/repaint_as_autocast.py", "ops_with(Trait.HAS_STEPS), ops_with(Trait.SLOPE_VARIES)", "ops_with(Trait.HAS_STEPS), frozenset[str]()"),),
    ),
    Mutant(
        "hook-beside-input", "a hook on what an op gives back of an input misses its other readers where gradients are scaled", ("programs",), ("hook_identity",),
        (("passes/apply/scale_loss.py", " or given_back.get(node) in found\n", "\n"),),
    ),
    Mutant(
        "transform-result-read", "what leaves a torch.func transform counts as read by its op's backward, inside, where no border can stand", ("programs",), ("func_", "'fp16'"),
        (("amprewrite/graphs/fx/read/leaving.py", "    apart, read_back = transform_regions(graph), Answers", "    apart, read_back = _inside_transforms(graph), Answers"),),
    ),
    Mutant(
        "hook-behind-write", "a hook that the model puts on its input sees the gradient of what the model then writes there", ("programs",), ("hook_written",),
        (("amprewrite/runtime/captured/entries.py", "if not hooked_and_written(module.graph, dynamo.inputs_to_hook()):", "if True:"),),
    ),
    Mutant(
        "written-copy-read", "a sum in place is written to a copy of its operand, which others read later without it", ("programs",), ("write",),
        (("amprewrite/graphs/fx/read/aliasing.py", "if before and movable and max(readers, default=0) <= fact.position:", "if before and movable:"),),
    ),
    Mutant(
        "step-of-body-low", "what a body gives to a comparison alone overflows in it, and gradients are zero times infinity", ("programs",), ("large_unread", "'fp16'"),
        (("amprewrite/graphs/fx/read/bodies.py", "user in learning]", "user.users or user.op == \"output\"]"),),
    ),
    Mutant(
        "hook-on-given-back", "a result that an op gave back of a hooked value leaves beside the hook's path", ("programs",), ("hook_identity",),
        (("amprewrite/graphs/fx/read/leaving.py", "len(given.users) > 1 or given.target is hooked or inside", "len(given.users) > 1 or inside"),),
    ),
    Mutant(
        "checkpoint-result-given-back", "a checkpoint's result that an op gives back leaves beside the body's path", ("programs",), ("checkpoint(part", "'fp16'"),
        (("amprewrite/graphs/fx/read/leaving.py", "made_inside(result) is not None or made_inside(given) is not None", "made_inside(result) is not None"),),
    ),
    Mutant(
        "backwards-without-gradients", "second derivatives miss what an autograd Function saved", ("programs",), ("'function'", "'inner'"),
        (("passes/normalise/free_backwards.py", "    if all(mode is not None for mode in modes.values()):", "    if True or all(mode is not None for mode in modes.values()):"),),
    ),
    Mutant(
        "views-without-gradients", "results that share memory lose their gradients behind a compiler", ("programs",), ("'aot_eager'", "'fp16'", "('grad',"),
        (("passes/lower/suit_compiler.py", "        part_views(edited.module.graph)\n", ""),),
    ),
    Mutant(
        "views-apart", "results that share memory in the model leave a compiled graph by a cast each", ("programs",), ("'aot_eager'",),
        (("passes/lower/suit_compiler.py", "        if any(held[storage] > 1 for storage in memory_of(result)):\n            continue", "        if False:\n            continue"),),
    ),
    Mutant(
        "hooked-cast-apart", "behind a compiler, a hook on what an op gave back misses the gradient of the result", ("programs",), ("'aot_eager'", "hook"),
        (("passes/lower/suit_compiler.py", "    memory |= {storage for given in hooks for each in same_tensors(given) for storage in memory_of(each)}\n", ""),),
    ),
    Mutant(
        "hooked-anew", "behind a compiler, a hook on what a dropout gave back misses the gradient of its operand", ("programs",), ("'aot_eager'", "hook"),
        (("passes/lower/suit_compiler.py", "            read_operands(edited.module.graph)\n", ""),),
    ),
    Mutant(
        "written-recomputed", "behind a compiler, backward computes anew what a forward read of a buffer, from what was written after", ("programs",), ("'aot_eager'", "buffer"),
        (("passes/lower/suit_compiler.py", "        keep_reads(edited.module.graph)\n", ""),),
    ),
    Mutant(
        "none-becomes-zeros", "a head that no loss reads gets zeros as its gradient, which an optimizer decays", ("programs",), ("loss='unread'", "'fp16'"),
        (("amprewrite/graphs/fx/ops/scale_ops.py", "        ctx.set_materialize_grads(False)\n        ctx.factor, ctx.by = factor, by\n", "        ctx.factor, ctx.by = factor, by\n"),),
    ),
    Mutant(
        "region-without-gradients", "code that torch.compile is asked to compile once has no backward", ("programs",), ("region",),
        (("amprewrite/runtime/captured/graph_rewriter.py", "        open_compile_regions(module)\n", ""),
         ("passes/normalise/open_grad_regions.py", "        open_compile_regions(edited.module)\n", "")),
    ),
    Mutant(
        "copied-part-runs-original", "a copy of a part whose class copies itself runs the original's weights", ("states",), ("net='Copying'", "part_copy"),
        (("amprewrite/runtime/model/part_calls.py", "    return types.MethodType(own, module) if alone or copies_itself(type(module)) else made\n", "    return made\n"),),
    ),
    Mutant(
        "copies-torn-apart", "a copy of an object that holds a model and a part of it has a part that is no module of the model", ("states",), ("'holder'",),
        (("amprewrite/runtime/model/rewritten.py", "        if copies_itself(cls):\n", "        if True:\n"),),
    ),
    Mutant(
        "number-kept", "a graph that is compiled after its capture keeps a float argument of a call", ("states",), ("net='Guided'", "'aot_eager'", "'fp16'"),
        (("amprewrite/runtime/compiler/sizes.py", "        with outside_capture(ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)) as fixed:\n            return backend(module, list(map(fixed, inputs)))", "        if True:\n            return backend(module, inputs)"),),
    ),
    Mutant(
        "sizes-symbolic", "a graph that is compiled after its capture keeps an input that it writes, to read its sizes in backward", ("programs",), ("'inplace'", "'large", "'aot_eager'", "'fp16'"),
        (("amprewrite/runtime/compiler/sizes.py", "list(map(fixed, inputs))", "inputs"),),
    ),
    Mutant(
        "steep-padding", "the second derivative of a batch norm is infinite in padding, and NaN in all gradients", ("programs",), ("batch_norm", "'inner'", "'always'", "'fp16'"),
        (("passes/plan/plan_pads.py", "eps > 0 and eps**-1.5 > low.max", "False"),),
    ),
    Mutant(
        "dtype-needs-slice", "a padded value is cut for what reads its dtype alone, and does not read it any more", ("programs",), ("count_like", "'always'"),
        (("amprewrite/planner/padding/rules/shapes.py", ', ignored=rule.ignored)', ")"),),
    ),
    Mutant(
        "layout-kept", "a half tensor in an object does not take the shape that the model gives it", ("programs",), ("unsqueeze_", "holder='"),
        (("amprewrite/runtime/weights/half_values.py", "if (wide.shape, wide.stride()) != (first.shape, first.stride()):", "if False:"),),
    ),
    Mutant(
        "hook-behind-cast", "what a torch.func transform returns is cast behind its hooks", ("programs",), ("func_", "'hook'", "loss_scale"),
        (("amprewrite/graphs/fx/read/leaving.py", "left = regions.get(node, node) is not regions.get(hook)", "left = node not in regions"),),
    ),
    Mutant(
        "one-bound-small", "positions with one bound are taken for small ones", ("programs",), ("count_bound",),
        (("amprewrite/ir/evidence/counts.py", "(len(numbers) > 1 if op in BOUNDS else min(numbers, default=-1) >= 0)", "True"),),
    ),
    Mutant(
        "like-uncounted", "what has the shape or the dtype of an input counts as made of it", ("programs",), ("count_like",),
        (("amprewrite/ir/evidence/counts.py", "    given = given[:1] if op in READS_FIRST else () if op in UNSET | (UNIFORM - FILLS) else given\n", ""),),
    ),
    Mutant(
        "fill-rounded", "a fill in the dtype of a low value rounds a number that counts something", ("programs",), ("count_like",),
        (("amprewrite/ir/evidence/counts.py", "if node.op in UNIFORM & FILLS else", "if False else"),),
    ),
    Mutant(
        "new-memory-uncounted", "new memory counts as drawn at random, whatever is written into it", ("programs",), ("count_written",),
        (("amprewrite/ir/evidence/counts.py", "RANDOM = ops_with(Trait.RANDOM) - UNSET", "RANDOM = ops_with(Trait.RANDOM)"),),
    ),
    Mutant(
        "lengths-small", "lengths that a norm or a sum by groups gives are taken for small ones", ("programs",), ("count_lengths",),
        (("amprewrite/tables/ops/rows/traits.py", "scatter_add scatter_reduce segment_reduce trace norm \"\n    \"linalg_norm linalg_vector_norm dot", "scatter_add segment_reduce trace \"\n    \"dot"),),
    ),
    Mutant(
        "joined-statistics", "a batch norm of joined padded channels updates its statistics where padding is", ("programs",), ("Joined(", "'always'"),
        (("amprewrite/graphs/fx/ops/pad_ops.py", "(pad_dims(buffer.detach(), channels) for buffer in (running_mean, running_var))", "(F.pad(buffer.detach(), (0, x.shape[1] - len(buffer))) for buffer in (running_mean, running_var))"),
         ("amprewrite/graphs/fx/ops/pad_ops.py", "        running_mean.copy_(slice_dims(mean, channels))\n        running_var.copy_(slice_dims(var, channels))\n", "        running_mean.copy_(mean[: len(running_mean)])\n        running_var.copy_(var[: len(running_var)])\n")),
    ),
    Mutant(
        "held-half", "half tensors in an object stay half where code needs fp32", ("programs",), ("holder='", "'bf16'"),
        (("amprewrite/runtime/weights/half_values.py", "    return known and hasattr(value, \"__dict__\")\n", "    return False\n"),),
    ),
    Mutant(
        "clamped-overflow", "a hook that clamps gradients hides an overflow", ("states",), ("'clamp'", "'fp16'", "make_optimizer"),
        (("amprewrite/graphs/fx/ops/scale_ops.py", "    return gradient + (gradient - gradient)\n", "    return gradient\n"),),
    ),
    Mutant(
        "graph-kept", "a forward holds the graph between its parts, which holds the forward", ("states",), ("'Broken'", "'fp16'", "make_optimizer"),
        (("amprewrite/runtime/ambient/past.py", "return value.grad_fn is None or value.grad_fn._sequence_nr() < number", "return True"),),
    ),
    Mutant(
        "trial-hooks", "a trial run puts the hooks of the model on the caller's tensors", ("programs",), ("function hook", "'fp16'"),
        (("amprewrite/runtime/captured/look_ahead.py", "self._aside(), hooks_kept(inputs), ", "self._aside(), "),),
    ),
    Mutant(
        "array-written", "a forward writes an array of NumPy, and the look at its first calls writes it once more", ("programs",), ("array", "'fp16'"),
        (("amprewrite/graphs/fx/node_facts.py", "if type(node.target).__module__ == NUMPY_CALLS:", "if False:"),),
    ),
    Mutant(
        "option-echoed", "a long value is repeated whole in the message that refuses it", ("options",), (),
        (("amprewrite/tables/boundary/arguments.py", "_QUOTE.repr(value)", "repr(value)"),
         ("amprewrite/tables/boundary/arguments.py", "    return text if len(text) <= most else", "    return text if True else")),
    ),
    Mutant(
        "option-raw", "a value of the wrong type ends in Python's own error", ("options",), (),
        (("amprewrite/api/rewrite.py", 'keywords("example_kwargs", example_kwargs)', "dict(example_kwargs)"),),
    ),
)  # fmt: skip


def copy_of_package(target: Path) -> None:
    """The package, its passes, this fuzzer and what it imports, as they are; with a pyproject.toml, without which passes would be those installed."""
    for folder in ("amprewrite", "passes", "tests/fuzz", "tests/support"):
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)


def _run(root: Path, arguments: list[str], module: str = "tests.fuzz") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False)


def prove(mutant: Mutant) -> str:
    """Whether the smallest program of a mutant is wrong with it and right without; "" if so, else what is not."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plain:
        copy_of_package(Path(plain))
        copy_of_package(Path(folder))
        mutant.apply(Path(folder))
        right, wrong = (_run(Path(root), [mutant.name], "tests.fuzz.proofs").returncode for root in (plain, folder))
    return "" if (right, wrong) == (0, 1) else f"status {right} as the code is, {wrong} with the mutant; expected 0 and 1"


def hunt(mutant: Mutant, minutes: float, seed: int, likely: bool) -> dict[str, object]:
    """Fuzz one mutant until a finding that the code as it is does not have; what was found and after how long."""
    start, end = time.monotonic(), time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plain:
        copy_of_package(Path(plain))
        copy_of_package(Path(folder))
        mutant.apply(Path(folder))
        resume: list[str] = []
        having = ["--having", ";".join(mutant.having)] if likely else []
        while time.monotonic() < end:
            left = (end - time.monotonic()) / 60
            _run(Path(folder), ["--first", "--minutes", f"{left:.2f}", "--kinds", ",".join(mutant.kinds), "--seed", str(seed), "--out", "found", *having, *resume])
            resume = ["--resume"]
            found = _latest(Path(folder) / "found" / "findings.jsonl")
            if found is None:
                break
            seconds = time.monotonic() - start
            if _run(Path(plain), ["--bare", f"{found['kind']}:{found['seed']}"]).returncode == 0:
                return {"mutant": mutant.name, "found": True, "seconds": round(seconds), "kind": found["kind"], "seed": found["seed"], "signature": found["signature"]}
    return {"mutant": mutant.name, "found": False, "seconds": round(time.monotonic() - start)}


def _latest(path: Path) -> dict[str, str] | None:
    """The last finding that counts, if it was made just now."""
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    counted = [each for each in lines if not each["signature"].startswith(("PyTorch alone", "rounding"))]
    return counted[-1] if counted else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutants", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="for each mutant")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--likely", action="store_true", help="run only cases that can show the bug")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--prove", action="store_true", help="run the smallest program of each mutant, and fuzz nothing")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if options.only is None or mutant.name in options.only]
    missed = 0
    if options.prove:
        for mutant in chosen:
            said = prove(mutant)
            missed += bool(said)
            print(f"{mutant.name:26} {said or 'proved'}", flush=True)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        for mutant in chosen:
            result = hunt(mutant, options.minutes, options.seed, options.likely)
            with (options.out / "mutants.jsonl").open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            missed += not result["found"]
            how = f"{result['kind']}:{result['seed']}  {result['signature']}" if result["found"] else "not found"
            print(f"{result['seconds']:5} s  {mutant.name:26} {how}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
