"""Cuts a model into stages: by names or numbers of layers, balanced by costs, or as the user has cut it.

The model is traced once (torch.fx). A layer is what lies between two places where a single tensor passes: a residual
block is one layer. A stage's parameters are the model's own, under the same names.

Tracing takes the model as it is in its present mode: what `forward` asks of `self.training` is fixed for good.
"""

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, fx, nn

from fedring.pipeline.errors import CutError


class Chain:
    """A model as layers that follow one another; `names` are those of the modules that begin them."""

    def __init__(self, model: nn.Module) -> None:
        self._traced = _trace(model)
        nodes = list(self._traced.graph.nodes)
        self._source, self._sink = nodes[0], nodes[-1]
        if self._source.op != "placeholder" or sum(node.op == "placeholder" for node in nodes) != 1:
            raise CutError("a model that is to be cut takes one tensor; its forward has other arguments")
        if len(nodes) < 3 or not isinstance(self._sink.args[0], fx.Node):
            raise CutError("a model that is to be cut computes one tensor")
        body = [node for node in nodes[1:-1] if node.op != "get_attr"]
        self._layers = _atoms(body, self._source, self._traced)
        self.names = [_name(layer) for layer in self._layers]

    def __len__(self) -> int:
        return len(self._layers)

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers `first` to `end`, without `end`, as one module."""
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
        """The parameters of each layer."""
        return [float(sum(p.numel() for p in self.stage(i, i + 1).parameters())) for i in range(len(self))]

    def measured(self, inputs: Tensor, *, repeats: int = 3) -> list[float]:
        """The seconds of each layer's forward and backward for a micro-batch like `inputs`; the best of `repeats`."""
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
    """Stages, each but the first beginning at the named layer."""
    chain = Chain(model)
    starts = [_find(chain, name) for name in names]
    if any(a >= b for a, b in pairwise([0, *starts])):
        raise CutError(f"the layers {', '.join(names)} are not in the model's order, or one is its first")
    return _stages(chain, [0, *starts, len(chain)])


def cut_by_counts(model: nn.Module, counts: Sequence[int]) -> list[nn.Module]:
    """Stages of as many layers as `counts` says."""
    chain = Chain(model)
    if min(counts, default=0) < 1 or sum(counts) != len(chain):
        raise CutError(f"counts {list(counts)} must be positive and add up to the model's {len(chain)} layers")
    return _stages(chain, [0, *accumulate(counts)])


def cut_evenly(model: nn.Module, stages: int, *, sample: Tensor | None = None) -> list[nn.Module]:
    """Stages whose most expensive one is as cheap as can be: by parameters, or by time if there is a sample input."""
    chain = Chain(model)
    costs = chain.costs() if sample is None else chain.measured(sample)
    return _stages(chain, [0, *accumulate(balanced(costs, stages))])


def as_cut(stages: object) -> list[nn.Module]:
    """The stages that the user's own code has made, once they are seen to fit."""
    if not isinstance(stages, Sequence | nn.ModuleList) or not all(isinstance(s, nn.Module) for s in stages):
        raise CutError("what cuts the model must return a list of torch.nn.Modules, in order")
    return check_apart(list(stages))


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """How many neighbouring costs each part takes, so that the largest sum is the least; every part takes one."""
    count = len(costs)
    if not 1 <= parts <= count:
        raise CutError(f"{count} layers cannot make {parts} stages")
    sums = [0.0, *accumulate(costs)]
    best = {(end, 1): (sums[end], 0) for end in range(1, count + 1)}  # largest sum, where the last part begins
    for part in range(2, parts + 1):
        for end in range(part, count + 1):
            options = ((max(best[at, part - 1][0], sums[end] - sums[at]), at) for at in range(part - 1, end))
            best[end, part] = min(options)
    cuts = [count]
    for part in range(parts, 0, -1):
        cuts.append(best[cuts[-1], part][1])
    return [end - start for start, end in pairwise(reversed(cuts))]


def check_apart(stages: list[nn.Module]) -> list[nn.Module]:
    """The stages; CutError if two of them share a parameter or a buffer."""
    owners: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            other, known = owners.setdefault(id(tensor), (number, name))
            if other != number:
                raise CutError(
                    f"{known} of stage {other} and {name} of stage {number} are one tensor: tied weights must lie in "
                    "one stage; cut elsewhere, or untie them"
                )
    return stages


class _Tracer(fx.Tracer):
    """Sees only the root's own forward if that is an nn.Sequential's: its layers then need not be traceable."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self._plain = plain

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module is one node of the graph."""
        if self._plain:
            return not isinstance(m, nn.Sequential)
        return super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.GraphModule:
    try:
        graph = _Tracer(isinstance(model, nn.Sequential)).trace(model)
    except Exception as error:  # the user's code may raise anything when it meets a value that is none yet
        raise CutError(
            f"{type(model).__name__} cannot be cut automatically ({error}): name a module:attribute that returns stages"
        ) from error
    traced = fx.GraphModule(model, graph)
    traced.train(model.training)
    return traced


def _atoms(body: Sequence[fx.Node], source: fx.Node, traced: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes, cut before every module that nothing but the value just computed is left for.

    A module that writes into its input begins no layer: what comes from another stage is not to be written.
    """
    place = {node: index for index, node in enumerate(body)}

    def last_use(node: fx.Node) -> int:
        return max((place.get(user, len(body)) for user in node.users), default=-1)

    layers: list[list[fx.Node]] = [[body[0]]]
    older = last_use(source)  # until where something other than the last value is used
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
        f"no layer begins at {name!r}: a single tensor must pass there; choose from {', '.join(chain.names)}"
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
