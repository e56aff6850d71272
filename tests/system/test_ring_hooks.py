"""Communication hooks and settings of DistributedDataParallel: over the ring they do what they do over Gloo."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.system.ring_scripts import hooks, ranks

QUICK = ("none", "torch fp16", "torch local SGD", "C++ allreduce", "optimizer in the hook", "int8", "powersgd", "topk")
GROUPS = {
    "buckets": ["plain", "many buckets", "views", "views, many buckets", "small gradients together"],
    "unused parameters": ["static graph, unused", "unused", "unused, changing", "without unused", "frozen"],
    "graphs": ["static graph", "checkpointed", "checkpointed anew", "no sync", "own buffers"],
    "uneven inputs": ["uneven", "uneven, many buckets", "buffers of the forward pass"],
}
POWER = ("torch power", "torch batched power", "torch fp16(power)")
"""With several buckets or unused parameters, Gloo hangs or aborts in these; they are trained in one bucket only."""
NO_CPU = {"torch bf16", "torch quantization", "torch quantization by channel", "torch batched power"}
"""torch's hooks that fail on the CPU over Gloo, too."""
NOT_OURS = {"C++ fp16"}
"""It takes only futures that are made in C++. torch's hook in Python does the same."""


def check(cases: list[tuple[str, str]], folder: Path) -> None:
    """Train in all cases over both backends, and compare every bit."""
    first, second = ranks.run(partial(hooks.compare, cases=cases), 2, folder)
    for case, (ours, gloo), (ours_there, _) in zip(cases, first, second, strict=True):
        assert ours == gloo, f"{case}: not as over Gloo"
        error, values = ours
        assert not error, f"{case}: {error}"
        assert values[: hooks.TRAINED] == ours_there[1][: hooks.TRAINED] or case[0] in hooks.LOCAL, f"{case}: replicas"


@pytest.mark.parametrize("group", GROUPS)
def test_hooks_train_as_over_gloo(group: str, tmp_path: Path) -> None:
    check(list(itertools.product(QUICK, GROUPS[group])), tmp_path)


def test_sparse_gradients_train_as_over_gloo(tmp_path: Path) -> None:
    check([(hook, "sparse") for hook in ("none", "C++ allreduce")], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("flags", [flags for group in GROUPS.values() for flags in group])
def test_all_hooks_train_as_over_gloo(flags: str, tmp_path: Path) -> None:
    left_out = {*NO_CPU, *NOT_OURS, *(() if flags == "plain" else POWER)}
    check([(hook, flags) for hook in hooks.HOOKS if hook not in left_out], tmp_path)


def test_what_fails_over_gloo_fails_over_the_ring(tmp_path: Path) -> None:
    cases = [*((hook, "plain") for hook in NO_CPU), ("none", "mixed precision")]
    for case, (ours, gloo) in zip(cases, ranks.run(partial(hooks.compare, cases=cases), 2, tmp_path)[0], strict=True):
        assert ours[0], case
        assert gloo[0], case


def test_a_second_hook_is_refused_and_a_shared_module_trains_in_both_models(tmp_path: Path) -> None:
    for backend in ("fedring", "gloo"):
        error, (first, second) = ranks.run(hooks.share, 2, tmp_path / backend, backend=backend)[0]
        assert "can only be called once" in error
        assert first == second


def test_averaged_models_are_as_over_gloo(tmp_path: Path) -> None:
    ours, gloo = (ranks.run(hooks.average, 4, tmp_path / name, backend=name) for name in ("fedring", "gloo"))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(gloo), rtol=1e-5, atol=1e-6)  # sums of four ranks
    assert ours[0] == ours[1] == ours[2] == ours[3]


def test_a_sharded_optimizer_trains_as_over_gloo(tmp_path: Path) -> None:
    ours, gloo = (ranks.run(hooks.shard, 2, tmp_path / name, backend=name) for name in ("fedring", "gloo"))
    assert ours == gloo
    assert ours[0] == ours[1]


def test_a_sharded_optimizer_steps_in_the_backward_pass(tmp_path: Path) -> None:
    """torch refuses this over Gloo, and so the usual optimizer over the ring says what must come out."""
    body = partial(hooks.shard, overlapped=True)
    ours = ranks.run(body, 2, tmp_path / "overlapped")
    alone = ranks.run(hooks.shard, 2, tmp_path / "usual")
    assert ours[0] == ours[1]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(alone), rtol=1e-5, atol=1e-6)
