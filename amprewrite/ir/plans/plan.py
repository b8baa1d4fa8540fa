"""A plan is frozen data about a model: the precision (colour) of each node with a reason, the casts, the pads, and other changes of ops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

from amprewrite.ir.plans.pad_plan import PadPlan
from amprewrite.ir.plans.product_plan import ProductReason, QuantisedProducts
from amprewrite.ir.plans.versions import SCHEMA, migrate
from amprewrite.tables.boundary.arguments import did_you_mean, shown
from amprewrite.tables.boundary.json_data import BadData, build, read_json
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import BASE, FORMATS, FP8, GEMMS, RECIPES, SCALED_FORMATS, WIDE
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Colour, Edit, OpKind, Reason


@dataclass(frozen=True)
class NodePlan:
    """The format in which one node runs, and why."""

    name: str
    """The name that `print(plan)` shows. `plan.explain`, `plan.edit` and overrides of the form "node:NAME" take this name."""
    op: str
    """ATen base name, such as "linear". The command `amprewrite lists` prints all names."""
    colour: Colour
    """low, high (fp32) or plain (no fp32 value, so it is never cast). This is the one key that users edit."""
    reason: Reason
    """Why the node has this colour. In JSON, the name of a member of `amprewrite.tables.vocabulary.Reason`."""
    because_of: str = ""
    """Name of the node that caused the colour; "" if no node did."""
    detail: str = ""
    """A detail of the reason, such as the override or the range that was seen; "" if there is none."""
    kind: OpKind | None = None
    """Kind of the op in the op lists (allow, deny, ...); None if the op is on no list."""
    dtype: str = ""
    """Dtype of the node's result after the rewrite, such as "bf16"; "" if the result is no tensor."""
    shape: tuple[int | str, ...] = ()
    """Shape of the node's result. A size that varies between calls is given by a name."""
    flops: int = 0
    """FLOPs of one forward, a multiply and an add counted as two; 0 if the op is no product of tensors."""
    module: str = ""
    """Path of the module that calls the op, "" for the root."""
    source: str = ""
    """The line of the model's code that calls the op, as "file.py:12"; "" if unknown."""
    role: str = "op"
    """"op", or for a value that enters or leaves the graph: "input", "parameter", "buffer", "constant", "output"."""
    inputs: tuple[str, ...] = ()
    """Names of the nodes whose results this node reads. Results that were not fp32 before the rewrite are left out."""

    def sentence(self) -> str:
        """Return one sentence about the node's format and the reason for it."""
        where = f" in {self.module}" if self.module else ""
        at = f" ({self.source})" if self.source else ""
        if self.colour is Colour.PLAIN:
            return f"{self.name}{where} is never cast because {self.why()}{at}"
        return f"{self.name}{where} runs {self.colour.value} ({self.dtype or 'no float result'}) because {self.why()}{at}"

    def why(self) -> str:
        """Return the reason in words, followed in brackets by the node that caused it and by the detail, if any."""
        extra = ", ".join(x for x in (self.because_of, self.detail) if x)
        return f"{self.reason.value} ({extra})" if extra else self.reason.value


@dataclass(frozen=True)
class Cast:
    """One copy of a value in another format. All its users share the copy."""

    value: str
    """Name of the node whose result is copied."""
    to: str
    """Format name: "fp32", "bf16" or "fp16"."""
    users: tuple[str, ...]
    """Names of the nodes that read the copy; "output" for a result of the graph."""
    saturate: bool = False
    """Whether the value is clamped to the format's range before the cast, so that finite numbers of a mask do not become infinite."""
    weight: bool = False
    """Whether the value is a parameter, or a constant of an ONNX file."""
    write_version: int = 0
    """Version of the value that is copied: each in-place write to its memory makes a new version, and so does a change of the grad mode."""

    def __str__(self) -> str:
        users = ", ".join(self.users[:4]) + (f" and {len(self.users) - 4} more" if len(self.users) > 4 else "")
        return f"{self.value} -> {self.to} for {users}" + (" (saturating)" if self.saturate else "")


@dataclass(frozen=True)
class NodeEdit:
    """One change of an op that is neither a cast nor a pad, such as fp32 statistics of a norm."""

    node: str
    """Name of the op that is edited."""
    what: Edit
    """The kind of the edit. In JSON, a value of `amprewrite.tables.vocabulary.Edit`."""
    on: bool = True
    """False if the edit is possible but switched off."""

    def __str__(self) -> str:
        return f"{self.node} {self.what.says}" if self.on else f"{self.node} stays as it is (switched off: {self.what.value})"


@dataclass(frozen=True)
class Skipped:
    """A part of the model that runs outside the rewritten graphs, and the reason."""

    where: str
    """The part: a line as "file.py:12 in forward", a module path, or the name of a graph."""
    why: str
    """The reason, as a sentence."""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True)
class Candidate:
    """One choice of colours (low or high) for the ops of a graph, with the predicted time of the graph."""

    name: str
    """Name of the rules that gave the colours, such as "autocast rules"; "this plan" for the plan itself."""
    seconds: float
    """Time of a pass through the graph: the sum over its ops and casts, each modelled or measured."""
    casts: int
    """Number of copies that a forward makes."""


PRODUCTS = ops_with(Trait.READS_FP8)
LEFT = "left in fp32: "
"""Start of the note of a region (the plan of one graph) that runs in fp32 as a whole; the reason follows."""
FLUSHES = "computes in the low format itself, in a backward that the user wrote, on gradients that are not scaled: small ones become zero"
"""The note of a subgraph in which small gradients become zero, because the loss scale does not reach the gradients inside it."""


@dataclass(frozen=True)
class RegionPlan:
    """The plan of one captured graph."""

    name: str
    """Name of the region. If a ModelPlan has several regions, it calls a node "region/node"."""
    nodes: tuple[NodePlan, ...]
    """All nodes in canonical order: makers before readers."""
    casts: tuple[Cast, ...]
    """Copies of values in another format. They can be computed from the colours, so that a plan edited by hand may list none."""
    training: bool = False
    """Whether the graph was captured with gradients."""
    notes: tuple[str, ...] = ()
    """Remarks, a sentence each."""
    entry: str = ""
    """Path of the module whose call was captured, "" for the root."""
    pads: PadPlan = field(default_factory=PadPlan)
    """All padding of the region."""
    edits: tuple[NodeEdit, ...] = ()
    """Changes of single ops that are neither casts nor pads."""
    bodies: tuple[RegionPlan, ...] = ()
    """Plans of the subgraphs inside this graph: bodies of activation checkpoints, loops, conditions, scans, maps and autograd Functions.
    A ModelPlan lists these plans as separate regions."""
    basis: Any = field(default=None, compare=False, repr=False)
    """The `Problem` from which this plan was decided, so that `report/questions/explain.py` can decide it again. It is not in the JSON."""
    candidates: tuple[Candidate, ...] = ()
    """The plans that were compared by price, this plan first; empty if no plans were compared."""
    priced_on: str = ""
    """Name of the device for which the candidates were priced; "" without candidates."""
    scales_loss: bool = False
    """Whether gradients are multiplied by the loss scale inside this region."""
    quantised: QuantisedProducts = field(default_factory=QuantisedProducts)
    """The decisions about fp8. They are not written to JSON if fp8 was considered for no product."""

    def edited(self, *what: Edit) -> dict[str, Edit]:
        """Return {name of an op: kind of its edit} for all edits of the kinds `what`, such as `Edit.WIDE_PRODUCT`, that are not off."""
        return {edit.node: edit.what for edit in self.edits if edit.on and edit.what in what}

    def flat(self, name: str) -> tuple[RegionPlan, ...]:
        """Return this plan of one graph, renamed to `name`, followed by the plans of its subgraphs, whose names are "name.subgraph"."""
        bodies = (part for body in self.bodies for part in body.flat(f"{name}.{body.name}"))
        return (replace(self, name=name, bodies=()), *bodies)

    @property
    def left(self) -> tuple[str, ...]:
        """Sentences, one for each graph that stays fp32 as a whole (this graph or a subgraph of it), with the reason; () if none."""
        return tuple(note for note in self.notes if note.startswith(LEFT)) + tuple(
            f"{body.name} of {self.name} stays fp32: {text.removeprefix(LEFT)}" for body in self.bodies for text in body.left
        )

    @property
    def flushes(self) -> tuple[str, ...]:
        """Sentences, one for each subgraph in which small gradients may become zero, because they are not scaled; () if there is none."""
        own = tuple(f"{body.name} of {self.name} {FLUSHES}" for body in self.bodies if FLUSHES in body.notes)
        return own + tuple(text for body in self.bodies for text in body.flushes)

    def __str__(self) -> str:
        return "\n".join(map(printable, region_lines(self)))


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a model, with one region for each captured graph, and for each subgraph inside it.

    `to_json()` and `from_json()` round-trip exactly, `edit()` changes colours, `diff(other)` lists differences. Users get a `CastPlan`, a
    subclass that can also print, explain and draw itself.
    """

    low: str
    """Name of the low format."""
    regions: tuple[RegionPlan, ...]
    """One region for each captured graph, and for each subgraph inside it."""
    skipped: tuple[Skipped, ...] = ()
    """Parts of the model that run outside the rewritten graphs."""
    notes: tuple[str, ...] = ()
    """Remarks, a sentence each."""
    lists: str = "default"
    """Name of the op lists, which say by op what runs low and what in fp32."""
    version: int = field(default=SCHEMA)
    """Version of the JSON form."""

    # -- reading ------------------------------------------------------------
    @property
    def nodes(self) -> tuple[NodePlan, ...]:
        """All nodes of all regions (the plans of single graphs). If there are several regions, names have the form "region/node"."""
        return tuple(node for _, node in self.in_regions())

    @property
    def casts(self) -> tuple[Cast, ...]:
        """All casts of all regions (the plans of single graphs). If there are several regions, names have the form "region/node"."""
        if len(self.regions) == 1:
            return self.regions[0].casts
        return tuple(
            replace(cast, value=f"{region.name}/{cast.value}", users=tuple(f"{region.name}/{user}" for user in cast.users))
            for region in self.regions
            for cast in region.casts
        )

    def in_regions(self) -> Iterator[tuple[RegionPlan, NodePlan]]:
        """Yield (region, node) for each node in `nodes`. The region is the plan of the graph that holds the node."""
        several = len(self.regions) > 1
        for region in self.regions:
            for node in region.nodes:
                yield region, replace(node, name=f"{region.name}/{node.name}") if several else node

    def find(self, name: str) -> tuple[NodePlan, ...]:
        """Return the nodes named `name`, with or without "region/". If there are none, return the ops of the module with the path `name`.

        Ops of the module's submodules are included. Raises PlanError for an unknown name, with similar names, and if `name` is no string.
        """
        if not isinstance(name, str):
            raise PlanError(f"a node or a module is named by a string, not by one {type(name).__name__}; print(plan) lists all nodes")
        named = list(self.in_regions())
        hits = [node for region, node in named if name in (node.name, node.name.removeprefix(f"{region.name}/"))]
        hits = hits or [node for _, node in named if node.role == "op" and (not name or f"{node.module}.".startswith(f"{name}."))]
        if hits:
            return tuple(hits)
        known = {node.name for _, node in named} | {node.module for _, node in named}
        hint = did_you_mean(name, sorted(known), "; print(plan) lists all nodes", most=4)
        raise PlanError(f"no node and no module of the plan is called {shown(name)}{hint}")

    # -- JSON -----------------------------------------------------------------
    def to_json(self, indent: int | None = 1) -> str:
        """Return the whole plan as JSON text, from which `from_json` makes an equal plan. `indent` is as for json.dumps."""
        data = asdict(replace(self, regions=tuple(replace(region, basis=None) for region in self.regions)))
        for region, each in zip(data["regions"], self.regions, strict=True):
            del region["basis"]
            if not each.quantised:
                del region["quantised"]
        return json.dumps(data, indent=indent, default=_encode)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan in `text`, which `to_json` wrote and users may have edited. Raises PlanError if the text is no valid plan."""
        if not isinstance(text, str):
            raise PlanError(f"from_json() takes text that plan.to_json() wrote, not one {type(text).__name__}")
        try:
            data = read_json(text)
        except BadData as error:
            raise PlanError(f"this is no cast plan: {error}") from error
        if not isinstance(data, dict) or "regions" not in data:
            raise PlanError("this is no cast plan: the JSON has no 'regions'; write one with plan.to_json()")
        migrate(data)
        if data.get("version") != SCHEMA:
            raise PlanError(f"the plan has version {shown(data.get('version'))}, this amprewrite reads 1 to {SCHEMA}; make the plan anew")
        try:
            return _decode_plan(cls, data)
        except BadData as error:
            raise PlanError(f"the plan is damaged: {error}; compare it with plan.to_json()") from error
        except RecursionError as error:
            raise PlanError("the plan is damaged: it is nested too deeply; compare it with plan.to_json()") from error

    # -- changing and comparing -------------------------------------------------
    def edit(self, colours: Mapping[str, str]) -> Self:
        """Return a copy in which nodes, or all ops of modules, have other colours: `{"softmax_2": "high", "encoder.layer.0": "low"}`.

        In a plan without fp8 products, "fp32" also means "high", and the low format's name, such as "bf16", means "low". In a plan with fp8
        products, "fp8" and the low format's name give the format of a product's operands, and a key may be one of its GEMMs, such as
        "linear_3.grad_weight". In a bf16 plan, "wide" makes matrix products round their operands to bf16 and keep their results in fp32.
        `rewrite(model, plan=plan.edit(...))` computes casts, pads and fp8 copies anew. Nodes without an fp32 value do not change. Raises
        PlanError for an unknown name or colour, and for a name without nodes that could change.
        """
        if not isinstance(colours, Mapping):
            raise PlanError(f"edit() takes a dict such as {{'linear': 'high'}}, not one {type(colours).__name__}")
        if not any(region.quantised for region in self.regions):  # without fp8 products, names of formats can only mean colours
            words = {self.low: "low", "fp32": "high"}
            colours = {name: words.get(word, word) if isinstance(word, str) else word for name, word in colours.items()}
        formats = {name: word for name, word in colours.items() if word in (FP8, self.low)}
        if formats:
            rest = {name: word for name, word in colours.items() if name not in formats}
            return self._edit_products(formats).edit(rest) if rest else self._edit_products(formats)
        new: dict[str, Colour] = {}
        wide: set[str] = set()
        for name, word in colours.items():
            if word not in ("low", "high", WIDE):
                raise PlanError(
                    f"{shown(name)}: {shown(word)} is neither 'low' nor 'high', and for products {WIDE!r}, {FP8!r} or {self.low!r}"
                )
            found = [node for node in self.find(name) if node.colour is not Colour.PLAIN and node.role == "op"]
            if word == WIDE:
                found = [node for node in found if node.op in PRODUCTS]
                if self.low != BASE.name or not found:
                    raise PlanError(f"{shown(name)} holds no product that can be wide: that takes a matrix product, and {BASE.name}")
            if not found:
                raise PlanError(f"{shown(name)} holds no op with an fp32 value: it has no colour to change; inputs and weights stay fp32")
            new |= {node.name: Colour.LOW if word == "low" else Colour.HIGH for node in found}
            wide = {*wide, *(node.name for node in found)} if word == WIDE else wide - {node.name for node in found}

        def repaint(region: RegionPlan) -> RegionPlan:
            prefix = f"{region.name}/" if len(self.regions) > 1 else ""
            nodes = tuple(
                replace(
                    node,
                    colour=new[prefix + node.name],
                    reason=Reason.IN_PLAN,
                    because_of="",
                    detail="",
                    dtype=self.low if new[prefix + node.name] is Colour.LOW else "fp32",
                )
                if prefix + node.name in new
                else node
                for node in region.nodes
            )
            edits = tuple(edit for edit in region.edits if edit.what is not Edit.WIDE_PRODUCT or prefix + edit.node not in new)
            edits += tuple(NodeEdit(node.name, Edit.WIDE_PRODUCT) for node in nodes if prefix + node.name in wide)
            fp8 = region.quantised.without({node.name for node in nodes if new.get(prefix + node.name) is Colour.HIGH})
            return replace(region, nodes=nodes, casts=(), edits=edits, pads=PadPlan(), quantised=fp8, candidates=(), basis=None)

        return replace(self, regions=tuple(repaint(region) for region in self.regions))

    def _edit_products(self, formats: dict[str, str]) -> Self:
        """Return a copy with the formats in `formats`: {product, module or GEMM such as "linear_3.grad_in": "fp8" or the low format}."""
        regions = {region.name: region for region in self.regions}
        for name, word in formats.items():
            stem, _, last = name.rpartition(".")
            whole, gemm = (stem, last) if last in GEMMS and stem else (name, "")
            self.find(whole)
            found = [(region, node) for region in self.regions for node in self._nodes_of(region, whole) if region.quantised.of(node)]
            if not found:
                raise PlanError(f"{shown(name)} holds no product that fp8 was weighed for; rewrite(..., products='fp8') weighs it")
            for region, node in found:
                edited = regions[region.name].quantised.edited(node, gemm, FP8 if word == FP8 else self.low)
                regions[region.name] = replace(regions[region.name], quantised=edited, candidates=(), basis=None)
        return replace(self, regions=tuple(regions.values()))

    def switch_off(self, *names: str) -> Self:
        """Return a copy in which some edits are switched off: `plan.switch_off("scaled_dot_product_attention", "fp32 statistics")`.

        An edit is a change of an op that is neither a cast nor a pad. Each name is a node, a module, or a kind of edit (a value of
        `tables.vocabulary.Edit`). All edits of that node, module or kind are switched off. Raises PlanError for a name without edits.
        """
        regions = {region.name: region for region in self.regions}
        for name in names:
            found = 0
            for region in regions.values():
                nodes = self._nodes_of(region, name)
                chosen = [edit for edit in region.edits if edit.what.value == name or edit.node in nodes]
                edits = tuple(replace(edit, on=False) if edit in chosen else edit for edit in region.edits)
                regions[region.name] = replace(region, edits=edits, basis=None)
                found += len(chosen)
            if not found:
                known = dict.fromkeys(edit.what.value for region in self.regions for edit in region.edits)
                raise PlanError(f"{shown(name)} has no edit to switch off; the plan has: {', '.join(known) or 'none'}")
        return replace(self, regions=tuple(regions.values()))

    def _nodes_of(self, region: RegionPlan, name: str) -> set[str]:
        """Return the names of the nodes of `region` called `name` or inside the module `name`; none if `name` is a kind of edit."""
        if any(name == edit.value for edit in Edit):
            return set()
        prefix = f"{region.name}/" if len(self.regions) > 1 else ""
        return {node.name.removeprefix(prefix) for node in self.find(name) if node.name.startswith(prefix)}

    @property
    def casts_follow(self) -> bool:
        """True if ops run low but the plan lists no casts, as after `edit()`. Applying the plan computes casts from the colours."""
        return not self.casts and any(node.colour is Colour.LOW and node.role == "op" for node in self.nodes)

    def diff(self, other: ModelPlan) -> str:
        """Return the differences of `other` from this plan as text, one a line; "" if there are none.

        Casts and pads are not compared if one of the plans lists no casts, as after `edit`. Raises PlanError if `other` is no plan.
        """
        if not isinstance(other, ModelPlan):
            raise PlanError(f"diff() takes a plan, not one {type(other).__name__}")
        mine, theirs = ({node.name: node for node in plan.nodes} for plan in (self, other))
        lines = [f"only here: {one}" for one in mine if one not in theirs] + [f"only there: {one}" for one in theirs if one not in mine]
        lines += [
            f"{name}: {node.colour.value} -> {theirs[name].colour.value} ({theirs[name].why()})"
            for name, node in mine.items()
            if name in theirs and node.colour is not theirs[name].colour
        ]
        texts: dict[str, Callable[[ModelPlan], Iterable[str]]] = {} if self.casts_follow or other.casts_follow else {
            "cast": lambda plan: sorted(f"{c.value} -> {c.to} for {', '.join(c.users)}{' (saturating)' * c.saturate}" for c in plan.casts),
            "pad": lambda plan: (f"{region.name}: {pad}" for region in plan.regions for pad in region.pads.lines()),
        }  # fmt: skip
        for word, text in (texts | {"edit": lambda plan: (str(edit) for region in plan.regions for edit in region.edits)}).items():
            had, has = (dict.fromkeys(text(plan)) for plan in (self, other))
            lines += [f"{word} gone: {one}" for one in had if one not in has] + [f"{word} new: {one}" for one in has if one not in had]
        mine_gemms, their_gemms = (plan._gemms() for plan in (self, other))
        lines += [
            f"{name}: {mine_gemms[name][0] if name in mine_gemms else self.low} -> {formats} ({why})"
            for name, (formats, why) in their_gemms.items()
            if formats != (mine_gemms[name][0] if name in mine_gemms else self.low)
        ]
        gone = {name: formats for name, (formats, _) in mine_gemms.items() if name not in their_gemms and formats != other.low}
        lines += [f"{name}: {formats} -> {other.low}" for name, formats in gone.items()]
        return "\n".join(map(printable, lines))

    def _gemms(self) -> dict[str, tuple[str, str]]:
        """Return {name of a GEMM: (formats of its operands, reason)} for all GEMMs for which fp8 was considered."""
        return {
            f"{region.name}/{each.node}.{gemm.gemm}" if len(self.regions) > 1 else f"{each.node}.{gemm.gemm}": (gemm.formats, gemm.why())
            for region in self.regions
            for each in region.quantised.products
            for gemm in each.gemms
        }


def shape_of(node: NodePlan) -> str:
    """Return the shape of the node's result as text, such as "4x32x128"; "-" for a 0-dim tensor, and if the result is no tensor."""
    return "x".join(map(str, node.shape)) or "-"


def region_lines(region: RegionPlan, casts_follow: bool = False) -> list[str]:
    """Return the lines that `print` shows for one graph's plan: a line for each op and each cast, then fp8 products, pads, edits and notes.

    A cast precedes its first reader. `casts_follow` is True if the casts are not computed yet, so that their number is not shown.
    """
    state = "training" if region.training else "inference"
    casts = "casts follow" if casts_follow else f"{len(region.casts)} casts"
    lines = [f"{region.name} ({state}, {sum(n.role == 'op' for n in region.nodes)} ops, {casts})"]
    shown = [node for node in region.nodes if node.role == "op"]
    width = max((len(node.name) for node in shown), default=0)
    size = max((len(shape_of(node)) for node in shown), default=0)
    first: dict[str, list[Cast]] = {}
    for cast in region.casts:
        if cast.users:
            first.setdefault(cast.users[0], []).append(cast)
    for node in region.nodes:
        lines += [f"  {'cast':{width}}  {cast}" for cast in first.get(node.name, ())]
        if node.role == "op":
            lines.append(f"  {node.name:{width}}  {shape_of(node):{size}}  {node.dtype or '-':5}  {node.colour.value:5}  {node.why()}")
    lines += [f"  product {each}" for each in region.quantised.products] + [f"  fp8 copy {each}" for each in region.quantised.copies]
    lines += [f"  pad {each}" for each in region.pads.regions]
    lines += [f"  edit {each}" for each in region.edits]
    return lines + [f"  note: {note}" for note in region.notes]


def _encode(value: Any) -> Any:
    if isinstance(value, Colour | Edit | Reason | OpKind | ProductReason):
        return value.name if isinstance(value, Reason | ProductReason) else value.value
    raise TypeError(f"cannot write {type(value).__name__} into a plan")


P = TypeVar("P", bound=ModelPlan)


def _decode_plan(kind: type[P], data: dict[str, Any]) -> P:
    """Return the plan in `data`, which was parsed from JSON, as a `kind` object. If a field is invalid, raises BadData that names it."""
    plan: P = build(kind, data, names=frozenset({Reason, ProductReason}))
    plan = replace(plan, regions=tuple(replace(region, bodies=()) for region in plan.regions))
    _no_twice("regions", [region.name for region in plan.regions])
    formats = [("low", plan.low)]
    for index, region in enumerate(plan.regions):
        here = f"regions[{index}]"
        _no_twice(f"{here}.nodes", [node.name for node in region.nodes])
        formats += [(f"{here}.casts[{number}].to", cast.to) for number, cast in enumerate(region.casts)]
        quantised, known = region.quantised, (*SCALED_FORMATS, *RECIPES)
        said = [each.to for each in quantised.copies] + [quantised.recipe] * bool(quantised)
        wrong = [each for each in said if each not in known]
        if wrong:
            raise BadData(f"{here}.quantised names {shown(wrong[0])}, which is none of {', '.join(known)}")
    for where, name in formats:
        if name not in FORMATS:
            raise BadData(f"{where} is {shown(name)}, which is none of {', '.join(FORMATS)}")
    return plan


def _no_twice(where: str, names: list[str]) -> None:
    found = [name for name, count in Counter(names).items() if count > 1]
    if found:
        raise BadData(f"{where} has {found[0]!r} twice")
