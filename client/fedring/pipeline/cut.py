"""Cutting a model into stages: by names or numbers of layers, balanced by costs, or as the user's own code cuts it.

The model is traced once (torch.fx). A layer ends wherever a single tensor passes to the rest of the model, so a
residual block is one layer. The parameters of a stage are the model's own, under the same names.

Tracing records the model in its present mode. Where `forward` depends on `self.training`, the stages keep to that mode.
"""

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, fx, nn

from fedring.pipeline.errors import CutError


class Chain:
    """A model as a chain of layers.

    Attributes:
        names: The name of the module that begins each layer.
    """

    def __init__(self, model: nn.Module) -> None:
        """Trace a model.

        Raises:
            CutError: If it cannot be traced, or does not compute one tensor from one tensor.
        """
        self._traced = _trace(model)
        nodes = list(self._traced.graph.nodes)
        self._source, self._sink = nodes[0], nodes[-1]
        if self._source.op != "placeholder" or sum(node.op == "placeholder" for node in nodes) != 1:
            raise CutError("only a model whose forward takes one tensor can be cut, and this one has other arguments")
        if len(nodes) < 3 or not isinstance(self._sink.args[0], fx.Node):
            raise CutError("only a model that returns one tensor can be cut")
        body = [node for node in nodes[1:-1] if node.op != "get_attr"]
        self._layers = _layers_of(body, self._source, self._traced)
        self.names = [_name(layer) for layer in self._layers]

    def __len__(self) -> int:
        return len(self._layers)

    def stage(self, first: int, end: int) -> nn.Module:
        """Return the layers from `first` up to, but not including, `end` as one module."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        before = self._source if first == 0 else self._layers[first - 1][-1]
        copies[before] = graph.placeholder("inputs")

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies and node.op == "get_attr":
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in (node for layer in self._layers[first:end] for node in layer):
            for argument in node.all_input_nodes:
                copied(argument)
            copies[node] = graph.node_copy(node, copied)
        graph.output(copies[self._layers[end - 1][-1]])
        module = fx.GraphModule(self._traced, graph, "Stage")
        module.train(self._traced.training)
        return module

    def costs(self) -> list[float]:
        """Return the number of parameters of each layer."""
        return [float(sum(p.numel() for p in self.stage(i, i + 1).parameters())) for i in range(len(self))]

    def measured(self, inputs: Tensor, *, repeats: int = 3) -> list[float]:
        """Measure each layer's forward and backward.

        Args:
            inputs: A micro-batch [batch, ...] for the first layer.
            repeats: How often each layer is run.

        Returns:
            The shortest time of each layer, in seconds. Buffers are as before.
        """
        seconds = []
        for index in range(len(self)):
            layer = self.stage(index, index + 1)
            kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
            spent, outputs = zip(*(_timed(layer, inputs) for _ in range(max(1, repeats))), strict=True)
            for name, buffer in layer.named_buffers():
                buffer.copy_(kept[name])
            seconds.append(min(spent))
            inputs = outputs[0]
        return seconds


def cut_at(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Cut a model before the layers with these names, in the model's order.

    Raises:
        CutError: If the model cannot be cut there.
    """
    chain = Chain(model)
    starts = [_find(chain, name) for name in names]
    if any(a >= b for a, b in pairwise([0, *starts])):
        raise CutError(f"the layers {', '.join(names)} must be in the model's order, without its first layer")
    return _stages(chain, [0, *starts, len(chain)])


def cut_by_counts(model: nn.Module, counts: Sequence[int]) -> list[nn.Module]:
    """Cut a model into stages with these numbers of layers.

    Raises:
        CutError: If the counts do not add up to the model's layers, or the model cannot be cut there.
    """
    chain = Chain(model)
    if min(counts, default=0) < 1 or sum(counts) != len(chain):
        raise CutError(f"counts {list(counts)} must be positive and add up to the model's {len(chain)} layers")
    return _stages(chain, [0, *accumulate(counts)])


def cut_evenly(model: nn.Module, stages: int, *, sample: Tensor | None = None) -> list[nn.Module]:
    """Cut a model so that its most expensive stage is as cheap as possible.

    Args:
        model: The model.
        stages: The number of stages.
        sample: A micro-batch of inputs [batch, ...] to measure layers with; None balances parameters instead of time.

    Raises:
        CutError: If the model cannot be cut into this number of stages.
    """
    chain = Chain(model)
    costs = chain.costs() if sample is None else chain.measured(sample)
    return _stages(chain, [0, *accumulate(balanced(costs, stages))])


def as_cut(stages: object) -> list[nn.Module]:
    """Check the stages that a user's own code returned.

    Raises:
        CutError: If they are no list of modules, or share tensors.
    """
    if not isinstance(stages, Sequence | nn.ModuleList) or not all(isinstance(s, nn.Module) for s in stages):
        raise CutError("the callable that cuts the model must return a list of torch.nn.Modules, in order")
    return check_apart(list(stages))


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Divide costs into parts of neighbours so that the largest sum is as small as possible.

    Args:
        costs: The cost of each layer.
        parts: The number of parts.

    Returns:
        How many costs each part takes, at least one.

    Raises:
        CutError: If there are fewer costs than parts.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise CutError(f"{count} layers cannot make {parts} stages: give from 1 to {count} stages")
    sums = [0.0, *accumulate(costs)]
    # best[end, part]: for the first `end` costs in `part` parts, the largest sum, and where the last part begins.
    best = {(end, 1): (sums[end], 0) for end in range(1, count + 1)}
    for part in range(2, parts + 1):
        for end in range(part, count + 1):
            options = ((max(best[at, part - 1][0], sums[end] - sums[at]), at) for at in range(part - 1, end))
            best[end, part] = min(options)
    cuts = [count]
    for part in range(parts, 0, -1):
        cuts.append(best[cuts[-1], part][1])
    return [end - start for start, end in pairwise(reversed(cuts))]


def check_apart(stages: list[nn.Module]) -> list[nn.Module]:
    """Check that no two stages share a parameter or a buffer, and return the stages.

    Raises:
        CutError: If two stages share a tensor.
    """
    owners: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            other, known = owners.setdefault(id(tensor), (number, name))
            if other != number:
                raise CutError(
                    f"{known} of stage {other} and {name} of stage {number} are one tensor: tied weights must be in "
                    "one stage; cut at other layers, or untie them"
                )
    return stages


class _Tracer(fx.Tracer):
    """A tracer that does not look into the layers of an nn.Sequential, so that they need not be traceable."""

    def __init__(self, *, sequential: bool) -> None:
        super().__init__()
        self._sequential = sequential

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the module is one node of the graph."""
        if self._sequential:
            return not isinstance(m, nn.Sequential)
        return super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.GraphModule:
    try:
        graph = _Tracer(sequential=isinstance(model, nn.Sequential)).trace(model)
    except Exception as error:  # the user's code may raise anything when it gets a proxy instead of a tensor
        raise CutError(
            f"{type(model).__name__} cannot be cut automatically ({error}): name a module:attribute that returns stages"
        ) from error
    traced = fx.GraphModule(model, graph)
    traced.train(model.training)
    return traced


def _layers_of(body: Sequence[fx.Node], source: fx.Node, traced: fx.GraphModule) -> list[list[fx.Node]]:
    """Divide the nodes of a graph into layers.

    A layer begins at a module if this module and all later nodes need no older value than the one just computed. A
    module that works in place begins no layer, because it would write into the message from another stage.
    """
    place = {node: index for index, node in enumerate(body)}

    def last_use(node: fx.Node) -> int:
        return max((place.get(user, len(body)) for user in node.users), default=-1)

    layers: list[list[fx.Node]] = [[body[0]]]
    older = last_use(source)  # the last place where a value other than the newest is used
    for index, node in enumerate(body[1:], 1):
        begins = node.op == "call_module" and not getattr(traced.get_submodule(str(node.target)), "inplace", False)
        if begins and older < index:
            layers.append([])
        layers[-1].append(node)
        older = max(older, last_use(body[index - 1]))
    return layers


def _name(layer: Sequence[fx.Node]) -> str:
    return str(layer[0].target) if layer[0].op == "call_module" else "inputs"


def _find(chain: Chain, name: str) -> int:
    for index, known in enumerate(chain.names):
        if known == name or known.startswith(f"{name}."):
            return index
    raise CutError(
        f"no layer begins at {name!r}, since other values are still needed there: choose from {', '.join(chain.names)}"
    )


def _stages(chain: Chain, cuts: Sequence[int]) -> list[nn.Module]:
    return check_apart([chain.stage(first, end) for first, end in pairwise(cuts)])


def _timed(layer: nn.Module, inputs: Tensor) -> tuple[float, Tensor]:
    leaf = inputs.detach()
    if leaf.is_floating_point():
        leaf.requires_grad_()
    began = time.perf_counter()
    output: Tensor = layer(leaf)
    if output.requires_grad:
        wanted = [tensor for tensor in (leaf, *layer.parameters()) if tensor.requires_grad]
        torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    return time.perf_counter() - began, output.detach()
