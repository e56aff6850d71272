"""The layers of a traced model, and stages made of neighbouring layers.

The model is traced once (torch.fx). The parameters of a stage are the model's own, under the same names. Tensors travel
as in torch.distributed.pipelining (`_IR.py`, "Non-local activations"): from the stage that makes one straight to all
stages that use it. That package is not used here because it traces with torch.export, which needs example inputs, and
cuts with torch.fx.passes.split_module, which renames the parameters of stages (`target.replace(".", "_")`).

Tracing records the model in its present mode. Arguments that are `self.training`, as of functional.dropout, follow the
mode of the stage; whatever else a forward decides by `self.training` stays as it is.
"""

import functools
import inspect
import operator
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor, fx, nn

from fedring.pipeline.errors import CutError
from fedring.schedules.routes import BATCH, Routes

INPUTS = "inputs"
"""The name of the batch's tensor for a model whose forward takes only one."""

_PLAIN_NAME = re.compile(r"[\w ./-]*")

_AUGMENTED = {
    getattr(operator, name) for name in operator.__all__ if name[0] == "i" and hasattr(operator, f"__{name[1:]}__")
}  # such as operator.iadd


class Stages(list[nn.Module]):
    """The stages of a model, in order.

    If they are a chain, each takes one tensor and returns one. Otherwise, each takes its tensors as keywords, and
    returns a dict of tensors, the last one of a single tensor.

    Attributes:
        routes: The tensors that each stage uses, and where they come from.
    """

    def __init__(self, modules: Iterable[nn.Module], routes: Routes) -> None:
        """Check that the modules and the routes fit together.

        Each module but the last must make a tensor that a later one uses.

        Raises:
            CutError: If not.
        """
        super().__init__(modules)
        self.routes = routes
        if routes.stages != len(self):
            raise CutError(f"the routes are of {routes.stages} stages, but there are {len(self)} modules")
        for number in range(len(self) - 1):
            if not routes.consumers(number):
                raise CutError(f"no later stage uses what stage {number} makes: cut at other layers")


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Neighbouring nodes of the graph, with the nodes at their borders."""

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]


class Layers:
    """The layers of a model, in the order of computation.

    A layer begins at a module to which a single tensor passes, so a residual block is one layer. If this gives fewer
    layers than stages, every module begins a layer, and several tensors may pass. A module never begins a layer if it,
    or what comes later, changes an earlier tensor in place, because other stages may have the same tensor.

    Attributes:
        names: The name of the module that begins each layer.
    """

    def __init__(self, model: nn.Module, *, stages: int = 1) -> None:
        """Trace a model.

        The arguments of its forward are tensors of the batch; those with a default keep it.

        Args:
            model: The model.
            stages: The least number of layers to look for.

        Raises:
            CutError: If it cannot be traced, or does not compute one tensor from tensors.
        """
        self._traced = _trace(model)
        nodes = list(self._traced.graph.nodes)
        self._arguments = [node for node in nodes if node.op == "placeholder"]
        self._body = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
        result = nodes[-1].args[0]
        if not self._arguments or any(str(node.target).startswith("*") for node in self._arguments):
            raise CutError("only a model whose forward takes tensors by name can be cut, and no *args or **kwargs")
        if not isinstance(result, fx.Node) or result not in self._body:
            raise CutError("only a model that returns one tensor can be cut")
        self._result = result
        self._place = {node: index for index, node in enumerate(self._body)}
        modules = [0, *self._beginnings()]
        # Prefer borders that a single tensor passes, for they make a chain of stages; fall back to all modules if they
        # are too few.
        single = [at for at in modules if at == 0 or self._single(at)]
        self._starts = single if len(single) >= stages else modules
        self._all = modules
        self.names = [_name(self._body[at]) for at in self._starts]

    def __len__(self) -> int:
        return len(self._starts)

    def stages(self, counts: Sequence[int]) -> Stages:
        """Return stages with these numbers of layers.

        They must add up to all layers.
        """
        return self._cut([self._starts[end] for end in [0, *accumulate(counts[:-1])]])

    def stages_at(self, names: Sequence[str]) -> Stages:
        """Return stages that begin at the modules with these names.

        The first stage begins at the start of the model.

        Raises:
            CutError: If no stage can begin at one of them, or they are not in the model's order.
        """
        starts = [0, *(self._find(name) for name in names)]
        if any(first >= second for first, second in pairwise(starts)):
            raise CutError(f"the layers {', '.join(names)} must be in the model's order, without its first layer")
        return self._cut(starts)

    def costs(self) -> list[float]:
        """Return the number of parameters of each layer."""
        modules = (self._module(part) for part in self._parts(self._starts))
        return [float(sum(p.numel() for p in module.parameters())) for module in modules]

    def measured(self, sample: Tensor | Mapping[str, Tensor], *, repeats: int = 3) -> list[float]:
        """Measure each layer's forward and backward.

        Args:
            sample: A micro-batch [batch, ...] of the model's only argument, or of all its arguments by name.
            repeats: How often each layer is run.

        Returns:
            The shortest time of each layer, in seconds. Buffers are as before.
        """
        known: Mapping[str, Tensor] = {INPUTS: sample} if isinstance(sample, Tensor) else sample
        if len(self._arguments) == len(known) == 1:
            known = {INPUTS: next(iter(known.values()))}
        values = {node: _of_sample(known, self._name_of(node)) for node in self._arguments}
        seconds = []
        for part in self._parts(self._starts):
            layer = self._module(part)
            # A forward changes the running averages of BatchNorm, and measuring must not.
            kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
            given = {self._name_of(node): values[node] for node in part.inputs}
            spent, outputs = zip(*(_timed(layer, given) for _ in range(max(1, repeats))), strict=True)
            for name, buffer in layer.named_buffers():
                buffer.copy_(kept[name])
            seconds.append(min(spent))
            values |= {node: outputs[0][self._name_of(node)] for node in part.outputs}
        return seconds

    def _beginnings(self) -> Iterator[int]:
        """Yield the places of the modules at which a stage could begin."""
        changed = max((self._last_change(node) for node in self._arguments), default=0)
        for at, node in enumerate(self._body):
            if at and node.op == "call_module" and changed < at:
                yield at
            changed = max(changed, self._last_change(node))

    def _last_change(self, node: fx.Node) -> int:
        """Return the last place where a node's value is changed in place."""
        users = (user for user in node.users if _works_in_place(user, self._traced) and user.args[0] is node)
        return max((self._place[user] for user in users), default=0)

    def _single(self, at: int) -> bool:
        """Return whether a single value passes the border before `at`.

        It is the value just computed: the nodes from `at` on use no other.
        """
        older = [*self._arguments, *self._body[: at - 1]]
        return not any(self._place.get(user, at) >= at for node in older for user in node.users)

    def _find(self, name: str) -> int:
        for at in self._all:
            known = _name(self._body[at])
            if known == name or known.startswith(f"{name}."):
                return at
        raise CutError(
            f"no layer begins at {name!r}: it is no module of the model, or works in place; choose from "
            f"{', '.join(_name(self._body[at]) for at in self._all)}"
        )

    def _cut(self, starts: Sequence[int]) -> Stages:
        parts = self._parts(starts)
        makers = {node: number for number, part in enumerate(parts) for node in part.outputs}
        sources = tuple({self._name_of(node): makers.get(node, BATCH) for node in part.inputs} for part in parts)
        if all(len(part.inputs) == 1 and makers.get(part.inputs[0], BATCH) == at - 1 for at, part in enumerate(parts)):
            names = [INPUTS, *(f"stage{number}" for number in range(len(parts) - 1))]
            sources = tuple({name: number - 1} for number, name in enumerate(names))
            return Stages([self._module(part, single=True) for part in parts], Routes(sources))
        for number, part in enumerate(parts):
            if not part.inputs:
                raise CutError(f"stage {number} would have no inputs: cut at other layers")
        return Stages([self._module(part) for part in parts], Routes(sources))

    def _parts(self, starts: Sequence[int]) -> list[_Part]:
        """Divide the graph at these places.

        A buffer that several parts use, such as a table of positions, is an output of the first of them. A
        parameter stays with all that use it, so that it can be refused as tied.
        """
        groups = [self._body[first:end] for first, end in pairwise([*starts, len(self._body)])]
        made = {node: number for number, group in enumerate(groups) for node in group}
        for node in self._traced.graph.nodes:
            if node.op != "get_attr":
                continue
            value = _attribute(self._traced, str(node.target))
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                made[node] = min((made[user] for user in node.users if user in made), default=0)
        inputs: list[dict[fx.Node, None]] = [{} for _ in groups]
        for number, group in enumerate(groups):
            for node in group:
                needed = [used for used in node.all_input_nodes if used in made or used in self._arguments]
                inputs[number] |= dict.fromkeys(used for used in needed if made.get(used) != number)
        # The last stage returns the result, also if an earlier one has made it.
        if made[self._result] != len(groups) - 1:
            inputs[-1][self._result] = None
        wanted = {node for needs in inputs for node in needs} | {self._result}
        return [
            _Part(group, list(needs), [node for node in made if made[node] == number and node in wanted])
            for number, (group, needs) in enumerate(zip(groups, inputs, strict=True))
        ]

    def _module(self, part: _Part, *, single: bool = False) -> nn.Module:
        """Return a part as a module of named tensors.

        With `single` the module has one input, called `INPUTS`, and returns one tensor.

        With `single` its only input is called `INPUTS`.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in part.inputs:
            copies[node] = graph.placeholder(INPUTS if single else self._name_of(node))

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # a parameter or buffer
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in part.nodes:
            for argument in node.all_input_nodes:
                copied(argument)
            copies[node] = graph.node_copy(node, copied)
        results = {self._name_of(node): copied(node) for node in part.outputs or [self._result]}
        graph.output(next(iter(results.values())) if single else results)
        module = fx.GraphModule(self._traced, graph, "Stage")
        module.train(self._traced.training)
        return module

    def _name_of(self, node: fx.Node) -> str:
        """Return the unique name of a tensor.

        It is that of an argument, or of the node that makes the tensor.
        """
        if node in self._place or node.op == "get_attr":
            taken = {INPUTS, *(str(argument.target) for argument in self._arguments)}
            return f"{node.name}_value" if node.name in taken else node.name
        return INPUTS if len(self._arguments) == 1 else str(node.target)


class _Tracer(fx.Tracer):
    """A tracer that keeps the layers of an nn.Sequential whole.

    So these need not be traceable.
    """

    def __init__(self, *, sequential: bool) -> None:
        super().__init__()
        self._sequential = sequential

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the module is one node of the graph."""
        if self._sequential:
            return not isinstance(m, nn.Sequential)
        return super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.GraphModule:
    _check_names(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        graph = _graph_of(model)
        other = _graph_of(model.train(not model.training))
    except Exception as error:  # the user's code may raise anything when it gets a proxy instead of a tensor
        raise CutError(
            f"{type(model).__name__} cannot be cut automatically ({error}): name a module:attribute that returns stages"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    _follow_mode(graph, other, training=model.training)
    traced = fx.GraphModule(model, graph)
    traced.train(model.training)
    first: dict[object, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        node.replace_all_uses_with(first.setdefault(node.target, node))
    return traced


def _check_names(model: nn.Module) -> None:
    """Check that the names in a model are plain.

    torch.fx writes them into Python code as they are.

    Keys of an nn.ModuleDict may come from the arguments of a job.
    """
    for name, _ in chain(model.named_modules(), model.named_parameters(), model.named_buffers()):
        if not _PLAIN_NAME.fullmatch(name):
            raise CutError(f"the name {name[:80]!a} in the model has other characters than letters, digits and _ . - /")


def _graph_of(model: nn.Module) -> fx.Graph:
    """Return the graph of a model in its present mode.

    Arguments with a default keep it.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    graph = _Tracer(sequential=isinstance(model, nn.Sequential)).trace(model, concrete_args=defaults or None)
    taken = {p.name for p in parameters} - set(defaults)
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).lstrip("*") not in taken:
            _erase(node)  # torch.fx still has the arguments that keep their defaults, and checks them
    return graph


def _follow_mode(graph: fx.Graph, other: fx.Graph, *, training: bool) -> None:
    """Replace constants that are the model's mode by `training`.

    The graph of the other mode shows which arguments they are.
    """
    pairs = list(zip(graph.nodes, other.nodes, strict=False))
    if len(graph.nodes) != len(other.nodes) or any(_what(a) != _what(b) for a, b in pairs):
        return
    for node, twin in pairs:
        with graph.inserting_before(node):
            for place, value in enumerate(node.args):
                if value is training and twin.args[place] is (not training):
                    node.update_arg(place, graph.create_node("get_attr", "training"))
            for key, value in node.kwargs.items():
                if value is training and twin.kwargs[key] is (not training):
                    node.update_kwarg(key, graph.create_node("get_attr", "training"))


def _what(node: fx.Node) -> tuple[str, object]:
    """Return the operation of a node, for a comparison of two traces.

    Constants of a forward have other names in each trace.
    """
    return node.op, None if node.op == "get_attr" else node.target


def _erase(node: fx.Node) -> None:
    """Erase a node and all that use it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _attribute(module: nn.Module, name: str) -> object:
    return functools.reduce(getattr, name.split("."), module)


def _works_in_place(node: fx.Node, traced: fx.GraphModule) -> bool:
    """Return whether a node changes its first argument."""
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = node.op != "get_attr" and name.endswith("_") and not name.endswith("__")
    return node.target in _AUGMENTED or named or bool(node.kwargs.get("inplace"))


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else INPUTS


def _of_sample(sample: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in sample:
        raise CutError(f"the sample has no {name!r}, which the model takes; it has {', '.join(sample)}")
    return sample[name]


def _timed(layer: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    leaves = {name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in inputs.items()}
    began = time.perf_counter()
    outputs: dict[str, Tensor] = layer(**leaves)
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    if roots:
        wanted = [tensor for tensor in (*leaves.values(), *layer.parameters()) if tensor.requires_grad]
        torch.autograd.grad([root.sum() for root in roots], wanted, allow_unused=True)
    return time.perf_counter() - began, {name: tensor.detach() for name, tensor in outputs.items()}
