"""torch.compile over the ring: it never looks into the backend, and the training is the same as without it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.ring_scripts import ranks
from tests.system.ring_scripts.machinery import functional_collectives, train_compiled, train_sharded


def check_close(result: Any, wanted: Any) -> None:
    for values, others in zip(result, wanted, strict=True):
        torch.testing.assert_close(values, others, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["fedring", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_compiled_training_in_many_buckets_is_the_same_as_another(backend: str, tmp_path: Path) -> None:
    first, second = ranks.run(partial(train_compiled, compiler="aot_eager"), 2, tmp_path / "a", backend=backend)
    assert first[1] == second[1]
    check_close(first, ranks.run(partial(train_compiled, compiler=""), 2, tmp_path / "b")[0])


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["fedring", "gloo"])
@pytest.mark.parametrize(
    "options", [{"compiler": "inductor"}, {"hook": "fp16"}, {"python_reducer": True}], ids=lambda one: next(iter(one))
)
def test_compilers_hooks_and_compiled_autograd(options: dict[str, Any], backend: str, tmp_path: Path) -> None:
    body = partial(train_compiled, **{"compiler": "aot_eager"} | options)
    first, second = ranks.run(body, 2, tmp_path / "a", backend=backend)
    assert first[1] == second[1]
    if "python_reducer" not in options:  # which trains with other shapes
        plain = ranks.run(partial(train_compiled, **options | {"compiler": ""}), 2, tmp_path / "b")[0]
        check_close(first, plain)


@pytest.mark.soak
def test_compiled_collectives_are_the_same_as_others(tmp_path: Path) -> None:
    compiled = ranks.run(partial(functional_collectives, compiler="aot_eager"), 2, tmp_path / "a")
    assert compiled == ranks.run(functional_collectives, 2, tmp_path / "b")
    assert compiled == ranks.run(functional_collectives, 2, tmp_path / "c", backend="gloo")


@pytest.mark.soak
def test_a_compiled_sharded_training_is_the_same_as_over_gloo(tmp_path: Path) -> None:
    compiled = ranks.run(partial(train_sharded, compiler="aot_eager"), 2, tmp_path / "a")
    for rank, other in enumerate(ranks.run(train_sharded, 2, tmp_path / "b", backend="gloo")):
        check_close(compiled[rank], other)
