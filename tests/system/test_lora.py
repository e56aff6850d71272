"""docs/examples/lora.py with real daemons: only adapters travel, the base stays, and both together are a whole model.

It needs the extra peft, which `make libraries` installs.
"""

import importlib
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedring.codec.digest import name_of
from fedring.control.failure import Failure
from fedring.train.tensors.files import load_model, save_model
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.state import frozen_digest, split
from tests.conftest import ROOT, missing, path_to
from tests.damage import ask
from tests.fleets import Control, Fleet, run_job, until_watching

pytestmark = pytest.mark.soak

EXAMPLES = ROOT / "docs" / "examples"
TRUSTED = {"trusted": ["fedring", "lora"]}
CLIENTS, ROUNDS = 3, 4
ADAPTERS = 2 * (4 * (64 + 192) + 4 * (64 + 128) + 4 * (128 + 64))
"""The parameters of the adapters of rank 4 of both blocks: of the layers qkv, up and down."""
_HEADER = 16  # bytes before the values of an fp32 or fp16 packet


@pytest.fixture(scope="module")
def lora() -> Iterator[ModuleType]:
    """Import the example."""
    try:
        importlib.metadata.version("peft")
    except importlib.metadata.PackageNotFoundError:
        missing("the package peft, which `make libraries` installs,")
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("lora")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def base(lora: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the base."""
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    lora.pretrain(str(path))
    return path


@pytest.fixture(scope="module")
def fleet(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one server and three clients for all tests of this file."""
    settings = TRUSTED | {"data_root": str(base.parent)}
    server = settings | {"keep_update_rounds": 50}
    with Fleet(tmp_path_factory.mktemp("lora"), server, [settings] * CLIENTS, env=path_to(EXAMPLES)) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, CLIENTS)
        yield fleet


@pytest.fixture
def control(fleet: Fleet) -> Iterator[Control]:
    """Connect to the control service."""
    with Control(fleet.control) as control:
        yield control


def job(base: Path, *, freeze_a: bool = False, **keys: Any) -> dict[str, Any]:
    """Return the example's job, with few rounds."""
    given = tomllib.loads((EXAMPLES / "lora.toml").read_text())
    arguments = {"base": base.name, "freeze_a": freeze_a}
    return given | {"rounds": ROUNDS, "model_args": arguments, "start": "fresh", "deadline_seconds": 240} | keys


def frozen(lora: ModuleType, base: Path) -> str:
    """Return the digest of the base in a model with adapters."""
    model = lora.adapted(base)
    return frozen_digest(model, split(model, Sharing(frozen_stay=True)).frozen)


def test_only_adapters_travel_and_with_the_base_they_are_a_whole_model(
    lora: ModuleType, base: Path, fleet: Fleet, control: Control, tmp_path: Path
) -> None:
    before = name_of(base.read_bytes())
    ended = run_job(control, job(base, encoding="fp32"))
    assert (ended.state, ended.reason) == ("completed", "")
    state = Path(fleet.server.settings["state_dir"])
    query = "SELECT length(payload) FROM updates JOIN rounds USING (round) WHERE job_id = ?"
    assert ask(state, query, ended.job_id) == [(_HEADER + 4 * ADAPTERS,)] * (ROUNDS * CLIENTS)
    newest = control.models(limit=1)[0]
    assert newest.parameters == ADAPTERS
    rounds = control.rounds(job_id=ended.job_id)
    assert rounds[0].metrics["server/accuracy"] > 0.5  # the base alone: 0.12
    assert name_of(base.read_bytes()) == before
    query = "SELECT DISTINCT frozen_digest FROM models WHERE job_id = ?"
    assert ask(state, query, ended.job_id) == [(frozen(lora, base),)]

    exported = tmp_path / "adapters.safetensors"
    control.export_model(newest.version, exported)
    lora.merge(str(base), str(exported), str(tmp_path / "merged"))
    adapters, first, whole = load_file(exported), load_file(base), load_file(tmp_path / "merged" / "model.safetensors")
    assert sum(tensor.numel() for tensor in adapters.values()) == ADAPTERS
    assert whole.keys() == first.keys()
    for name, values in first.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora"
        if name.endswith((".qkv.weight", ".up.weight", ".down.weight")):
            step = adapters[f"{prefix}_B.default.weight"] @ adapters[f"{prefix}_A.default.weight"]
            torch.testing.assert_close(whole[name], values + 2.0 * step)  # lora_alpha / rank = 2
            assert not torch.equal(whole[name], values)
        else:
            assert torch.equal(whole[name], values)

    plain: nn.Module = lora.Transformer()
    plain.load_state_dict(whole)
    by_peft = (
        importlib.import_module("peft")
        .PeftModel.from_pretrained(load_model(base, lora.Transformer()), tmp_path / "merged")
        .eval()
    )
    images = torch.randn(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(by_peft(images), plain.eval()(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("freeze_a", "parameters"), [(False, ADAPTERS), (True, 2 * 4 * (192 + 128 + 64))])
def test_an_encoding_makes_adapters_smaller_and_a_frozen_a_does_not_travel(
    base: Path, fleet: Fleet, control: Control, freeze_a: bool, parameters: int
) -> None:
    ended = run_job(control, job(base, freeze_a=freeze_a, rounds=1, encoding="fp16"))
    assert (ended.state, ended.reason) == ("completed", "")
    query = "SELECT length(payload) FROM updates JOIN rounds USING (round) WHERE job_id = ?"
    sizes = ask(Path(fleet.server.settings["state_dir"]), query, ended.job_id)
    assert sizes == [(_HEADER + 2 * parameters,)] * CLIENTS


def test_adapters_of_another_base_are_refused(lora: ModuleType, base: Path, control: Control) -> None:
    assert run_job(control, job(base, rounds=1)).state == "completed"
    other = base.with_name("other.safetensors")
    save_model(lora.Transformer(), other)
    with pytest.raises(Failure, match="was trained with other values of the"):
        control.start_job(job(other, start="newest"))
    assert run_job(control, job(base, rounds=1, start="newest")).state == "completed"
