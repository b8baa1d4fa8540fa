"""`Rewritten`, the methods that a rewritten model has in addition to those of its own class: plans, loss scale, exports."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from amprewrite.report.cast_plan import CastPlan, PendingPlan
from amprewrite.runtime.model.in_place import BEFORE
from amprewrite.runtime.model.rewritten import RewrittenBase, capture_now, session_of
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.optimizers.find_optimizers import optimizer_inside
from amprewrite.runtime.weights.freezing import check_freezable, freeze_weights, warn_of_optimizers, warn_of_rounded
from amprewrite.tables.errors import PlanError, PolicyError
from amprewrite.tables.extras import load_extra

if TYPE_CHECKING:
    from amprewrite.api.onnx.job import OnnxResult


class Rewritten(RewrittenBase):
    """The methods that a rewritten model has in addition to those of its own class.

    A submodule called by itself (`amp.encoder(x)`) also runs rewritten. Two cases cannot be detected and run the submodule's fp32 code:
    your own `torch.compile` around the submodule, and a direct call of its `forward`. A hook on all modules of the process
    (`register_module_forward_hook`) sees each call of the model. It sees calls of submodules only if no captured graph contains them.
    """

    @property
    def plan(self) -> CastPlan:
        """The plan of all graphs that have run, in the order of their first calls. Before the first call, using the plan raises PlanError.

        Graphs that differ only in sizes or mode are shown once, with a note on their number; `plans` has all of them. After a call of
        another method than `forward`, such as `encode_image`, the plan has the graphs of the submodules that this method calls.
        """
        session = session_of(self)
        computed_nothing = any(graphs.empty for graphs in session.graphs)
        if not (session.last or session.left_out or computed_nothing):
            return PendingPlan()  # type: ignore[return-value]
        return CastPlan.of(session.plan_of_all())

    @property
    def plans(self) -> tuple[CastPlan, ...]:
        """One plan for each set of graphs that has run together, such as in training, in evaluation, or for other shapes."""
        session = session_of(self)
        return tuple(CastPlan.of(session.plan_of(regions)) for regions in list(session.calls))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale built into the training graphs: `report()`, `value`, `state_dict()`, `load_state_dict()`."""
        return session_of(self).training.loss_scale

    def attach(self, optimizer: torch.optim.Optimizer, copies: bool = False, group: Any = None) -> None:
        """Have `optimizer` skip steps with overflowed gradients, and update the loss scale at its steps.

        Optimizers are also found without `attach`, at the first forward or at their first step. Set `copies=True` if the optimizer steps
        copies of the parameters, such as copies offloaded to another device. Such an optimizer cannot be found, so attach it. If
        `optimizer` is a wrapper, such as accelerate's, the torch optimizer inside is attached.

        `group` is a torch.distributed process group whose ranks hold different parts of one model, such as stages of a pipeline. The
        optimizers of all ranks then skip together. Each rank attaches its own optimizer with this group, and all must step equally
        often. DDP, FSDP and tensor parallel need no group.

        Raises PolicyError if the optimizer is attached already, or, without `copies`, if it has none of the model's parameters.
        """
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise PolicyError(f"group= takes a torch.distributed process group, such as dist.group.WORLD, not {type(group).__name__}")
        session_of(self).training.gate.attach(optimizer_inside(optimizer), copies, group)

    def export_program(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any) -> torch.export.ExportedProgram:
        """Export the whole rewritten model ahead of time, and return it as a torch.export.ExportedProgram.

        `args` and `kwargs` are example inputs. `options` (dynamic_shapes, strict) are passed to torch.export.export. Raises CaptureError
        if torch.export cannot capture the model.
        """
        from amprewrite.api.export_program import export_with_plan

        return export_with_plan(self, args, kwargs, **options)[0]

    def export_onnx(
        self, path: Any, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None, **options: Any
    ) -> OnnxResult:
        """Write the rewritten model to `path` as an ONNX file, and return the result with plan and report.

        `args` and `kwargs` are example inputs. `amprewrite.api.onnx.convert.export_onnx` documents `options`, the result and further
        errors. Raises EmitError if the onnx extra is not installed.
        """
        return load_extra("ONNX", "export_onnx").export_onnx(self, path, args, kwargs, **options)  # type: ignore[no-any-return]

    # -- frozen weights, for inference only ----------------------------------------
    def freeze(self, *args: Any, **kwargs: Any) -> None:
        """Store each weight in the format in which the captured graphs read it. For inference only.

        If arguments are given, the model is first called with these arguments. If all graphs captured so far read a weight in the low
        format, only its low values are kept. If graphs read it in both formats, both are kept. Other weights keep their dtype. Results stay
        bitwise the same. The weights take about half the memory, and calls cast no weights. Afterwards parameters take no gradients, and
        their `dtype` is still fp32; `state_dict()` holds the stored values. If the rewrite was not in place, memory is freed only when the
        original model is deleted: it keeps its fp32 weights, and the frozen model has its own copies of all weights.

        Raises PolicyError if the model is in training mode, frozen already or sharded; PlanError if nothing was captured.
        """
        session = session_of(self)
        check_freezable(self)
        warn_of_optimizers(self)
        called = bool(args or kwargs)
        with torch.no_grad():
            if called:
                capture_now(self, args, kwargs)
            if not session.regions:
                raise PlanError("freeze() goes by captured graphs, and there are none: call the model first, or amp.freeze(inputs)")
            session.freeze(freeze_weights(self, [region.reads.copies for region in session.regions], BEFORE not in self.__dict__))
            if called:
                capture_now(self, args, kwargs)

    def unfreeze(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Turn a frozen model back into an fp32 model that can be trained, with the values of `state_dict`.

        Without `state_dict`, weights that kept only low values get these values in fp32, and a warning says so. `load_state_dict` of fp32
        values also unfreezes the model. Raises PlanError if the model is not frozen, or `state_dict` lacks a frozen weight in its shape.
        """
        if session_of(self).options.frozen is None:
            raise PlanError(f"this {type(self).__name__} is not frozen")
        warn_of_rounded(session_of(self).thaw(state_dict))

    # -- low copies of weights -----------------------------------------------------
    def frozen_weights(self) -> AbstractContextManager[None]:
        """Keep low-precision copies of weights for calls without gradients in a `with` block. No thread may change weights in the block.

        A write that raises the version counter of a weight does no harm: the next call casts the weight again. Other writes
        are found at the end of the outermost block: every copy is compared with its weight, and a difference raises StaleWeightsError.
        """
        session = session_of(self)
        return session.cache.frozen(session.weight_names, "frozen_weights()", everywhere=True)

    def weights_changed(self) -> None:
        """Drop all low-precision copies of the weights, so that the next call casts the weights again.

        Call this method after a write that raises no version counter (`.data`, NumPy, DLPack, collectives), if `frozen_weights()` or
        `cache_weights="step"` keeps copies.
        """
        session_of(self).cache.clear()
