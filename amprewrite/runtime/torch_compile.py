"""The backend "amprewrite" of torch.compile: rewrite each graph that torch.compile captures, as `rewrite` does with graphs of a model.

1. Dynamo captures, guards and dispatches under the settings of the user, and passes one graph at a time to the backend.
2. Graphs that share parameters share a session. It has one loss scale, and skips steps of the optimizers of its parameters on overflow. The
   parameters of a graph are all parameters that it reads or that belong to modules whose code was captured.
3. Dynamo may call one graph for several models whose code and shapes are equal. The first call with other parameters rewrites the graph
   again, for the session of these parameters.
4. Each call of a graph counts as a separate forward, because the backend does not know which code runs between two graphs.
5. A session holds the user's modules by weak references, because Dynamo keeps graphs until their code is deleted.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from amprewrite.graphs.fx.captured import copy_graph
from amprewrite.graphs.fx.node_facts import source_name
from amprewrite.graphs.fx.read.names import clean_path
from amprewrite.ir.plans.plan import Skipped
from amprewrite.runtime.captured.region import Region
from amprewrite.runtime.options import Options
from amprewrite.runtime.session import Session
from amprewrite.runtime.weights.half_values import refuse_trainable
from amprewrite.tables.boundary.members import named_parameters_in, parameters_in
from amprewrite.tables.errors import PolicyError
from amprewrite.torch_internals.dispatch import current_backward
from amprewrite.torch_internals.dynamo import SkipFrame


def compile_graph(module: torch.fx.GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    """Rewrite a graph that torch.compile captured, and return the function to call in its place.

    Raises PolicyError if a trainable parameter of the graph, or of the modules whose code was captured, is in half precision.
    """
    modules = _modules_of_frame()
    for each in modules:
        refuse_trainable(named_parameters_in(each))
    refuse_trainable(_read_parameters(module, inputs))
    return _GraphOfMany(module, inputs, modules, options)


def _read_parameters(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (path, parameter) for the parameters among the inputs of a graph.

    Such a parameter may belong to a module that `_modules_of_frame` does not find, for instance because a decorator hides the module.
    """
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False):
        if isinstance(value, nn.Parameter):
            yield clean_path(source_name(node)), value


class _GraphOfMany:
    """The callable that Dynamo runs for a captured graph. The graph is rewritten once for each set of parameters that calls pass to it."""

    def __init__(self, module: torch.fx.GraphModule, inputs: list[Any], modules: Sequence[nn.Module], options: Options) -> None:
        self._options = options
        self._again, _ = copy_graph(module)
        self._places = [place for place, value in enumerate(inputs) if isinstance(value, nn.Parameter)]
        read = self._read(inputs)
        self._regions: dict[CompiledSession, Region] = {}
        self._now = self._rewrite(_session_for(modules, read, options), module, inputs)
        self._latest = [weakref.ref(each) for each in read]

    def __call__(self, *inputs: Any) -> Any:
        read = [inputs[place] for place in self._places]
        if not all(ref() is value for ref, value in zip(self._latest, read, strict=False)):
            self._now = self._for_others(self._read(inputs), list(inputs))
            self._latest = [weakref.ref(each) for each in read]
        session, region = self._now
        return session.run(region, *inputs)

    def _read(self, inputs: Sequence[Any]) -> list[nn.Parameter]:
        return [inputs[place] for place in self._places if isinstance(inputs[place], nn.Parameter)]

    def _for_others(self, read: Sequence[nn.Parameter], inputs: list[Any]) -> tuple[CompiledSession, Region]:
        """Return the session for the parameters `read`, and this graph rewritten for that session.
        Make the session, and rewrite the graph, only if that has not been done yet."""
        self._regions = {session: region for session, region in self._regions.items() if any(True for _ in parameters_in(session.root))}
        session = _session_for((), read, self._options) if read else self._now[0]
        if session in self._regions:
            return session, self._regions[session]
        return self._rewrite(session, copy_graph(self._again)[0], inputs)

    def _rewrite(self, session: CompiledSession, module: torch.fx.GraphModule, inputs: list[Any]) -> tuple[CompiledSession, Region]:
        self._regions[session] = session.take(module, inputs)
        return session, self._regions[session]


def sessions_of(module: nn.Module) -> list[CompiledSession]:
    """Return the sessions of the graphs that torch.compile captured from this module, the oldest first.

    A session holds the graphs and the loss scale of modules that share parameters. Graphs with other options have another session.
    """
    own = {id(p) for p in parameters_in(module)}
    found = [each for each in _SESSIONS if any(id(p) in own for p in parameters_in(each.root))]
    return sorted(found, key=lambda each: each.number)


class CapturedModules(nn.Module):
    """The model of a `CompiledSession`: weak references to the captured modules, and to captured parameters outside of these modules."""

    def __init__(self) -> None:
        super().__init__()
        self._tops: list[weakref.ref[nn.Module]] = []
        self._loose: list[weakref.ref[Tensor]] = []

    @property
    def tops(self) -> list[nn.Module]:
        """The outermost captured modules that still exist."""
        return [module for ref in self._tops if (module := ref()) is not None]

    def add(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> None:
        """Add the `modules` and `parameters` from which another graph was captured.

        Only outermost modules stay in `tops`. Parameters of an inner module are named by their path in the outer module.
        """
        tops = list(dict.fromkeys((*self.tops, *modules)))
        inside = {inner for top in tops for inner in top.modules() if inner is not top}
        self._tops = [weakref.ref(top) for top in tops if top not in inside]
        known = {id(p) for p in self.parameters()}
        self._loose += [weakref.ref(p) for p in parameters if id(p) not in known]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
        yield "", self
        for path, module in self._walk(nn.Module.named_modules):
            if path:
                yield path, module

    def _named_members(
        self, get_members_fn: Callable[[nn.Module], Any], prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield (name, member): members of `tops`, then other captured parameters. `named_parameters` and `named_buffers` call this."""
        yield from self._walk(nn.Module._named_members, get_members_fn, remove_duplicate=remove_duplicate)
        loose = nn.Module()
        for number, ref in enumerate(self._loose):
            loose._parameters[f"parameter_{number}"] = ref()  # type: ignore[assignment]
        yield from ((name, member) for name, member in get_members_fn(loose) if member is not None)

    def _walk(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the (name, value) pairs that `method` yields for each of `tops`. If there are several, names begin with "0.", "1.", ..."""
        tops = self.tops
        for number, top in enumerate(tops):
            front = f"{number}." if len(tops) > 1 else ""
            for path, found in method(top, *args, **kwargs):
                yield f"{front}{path}".rstrip("."), found


class CompiledSession(Session):
    """The session of graphs that torch.compile captured. It is compared and hashed by identity, so that a set can hold sessions."""

    number: int
    __eq__, __hash__ = object.__eq__, object.__hash__

    def take(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Region:
        """Rewrite another captured graph for this session, and return the rewritten graph as a `Region`.

        If the code sets a hook on an input that the graph overwrites, Dynamo would wrongly set the hook on the new value. Then this method
        warns and raises SkipFrame, so that Dynamo runs the frame as written. Under `fullgraph=True` it raises CaptureError instead.
        """
        graphs = self.entries[""].graphs
        try:
            graphs.leave_early_hooks(module)
        except SkipFrame as skipped:
            message = f"code that torch.compile reads runs as it is written, in fp32: {skipped}"
            graphs.left_out[message] = Skipped(graphs.entry.place, message)
            self.warn_fp32(message)
            raise
        region = self.rewrite_region(graphs, module, inputs)
        graphs.regions.append(region)
        return region

    def run(self, region: Region, *inputs: Any) -> Any:
        """Call a graph of this session, and return its results. Outside of a backward, each call counts as one forward pass."""
        self.state.forwards += current_backward() < 0  # in a backward, the call is a checkpoint's recomputation and no new forward
        self.training.begin_forward()
        try:
            results = region.call(inputs, self.state.forwards)
        finally:
            self.training.end_forward()
        self.training.await_backward(results)
        if (region,) != self.last:
            self._remember(self.entries[""], (region,))
        return results

    def look_at_weights(self) -> bool:
        """Return False: no graph needs a new capture. Weights are not checked, because Dynamo captures anew only if its guards fail."""
        return False

    def _check_overrides(self) -> None:
        """Warn if the user's `overrides` name a node that no graph has so far. This is no error, because a later graph may have it."""
        try:
            self._check_node_overrides()
        except PolicyError as error:
            self.warn_once(str(error))


_SESSIONS: weakref.WeakSet[CompiledSession] = weakref.WeakSet()


def _session_for(modules: Sequence[nn.Module], read: Sequence[Tensor], options: Options) -> CompiledSession:
    """Return the session that has equal options and shares a parameter with `modules` or `read`; a new session if there is none.

    `modules`: the modules whose code was captured. `read`: the parameters that the graph reads. Both are added to the session's model.
    """
    own = {id(p) for p in (*read, *(p for module in modules for p in parameters_in(module)))}
    for session in sorted(_SESSIONS, key=lambda each: each.number):
        if session.options == options and any(id(p) in own for p in parameters_in(session.root)):
            session.root.add(modules, read)  # type: ignore[operator]
            return session
    root = CapturedModules()
    root.add(modules, read)
    session = CompiledSession(options, root)
    session.number = max((each.number for each in _SESSIONS), default=0) + 1
    session.add_entry("", root.forward, captured=False)
    _SESSIONS.add(session)
    return session


def _modules_of_frame() -> list[nn.Module]:
    """Return the modules that Dynamo's outermost captured frame holds in local variables."""
    scope = InstructionTranslator.current_tx().output.root_tx
    found = [module for value in scope.f_locals.values() for module in _modules_in(value)]
    return list(dict.fromkeys(found))


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """Yield the module in `value`: a module, the owner of a bound method, or one of these in a `functools.partial` or a closure cell."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, types.MethodType):
        yield from _modules_in(value.__self__)
    elif isinstance(value, functools.partial):
        yield from _modules_in(value.func)
    elif isinstance(value, types.CellType):
        try:
            inside = value.cell_contents
        except ValueError:  # the closure's variable has no value yet
            return
        yield from _modules_in(inside)
