"""Trainings of a module that spans two devices, on a device "twin" that has two indices and computes with the CPU."""

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils import backend_registration, cpp_extension

SOURCE = Path(__file__).with_name("twin_device.cpp")
_NAME = "twin_device"


class TwinModule:
    """What torch looks for in its module of a device type, such as torch.cuda."""

    def __init__(self, library: object) -> None:
        self.current_device = getattr(library, "current_device")  # noqa: B009  # it has no type
        self.set_device = getattr(library, "set_device")  # noqa: B009

    def device_count(self) -> int:
        """Return the number of devices."""
        return 2

    def is_available(self) -> bool:
        """Return whether there are any."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the host draws all numbers."""


def build(folder: Path) -> Path:
    """Compile the device into a folder, which takes half a minute, and return the library."""
    cpp_extension.load(_NAME, [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O0"], is_python_module=False)
    return folder / f"{_NAME}.so"


def load(library: Path) -> None:
    """Add the device to torch in this process."""
    spec = importlib.util.spec_from_file_location(_NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    backend_registration.rename_privateuse1_backend("twin")
    torch._register_device_module("twin", TwinModule(module))  # type: ignore[no-untyped-call]  # torch's


class Spanning(nn.Module):
    """Two layers, on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(6, 8).to(first)
        self.norm = nn.BatchNorm1d(8).to(second)
        self.right = nn.Linear(8, 3).to(second)
        self._devices = first, second

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [batch, 3], on the host, of inputs [batch, 6]."""
        first, second = self._devices
        hidden = torch.tanh(self.left(inputs.to(first))).to(second)
        logits: Tensor = self.right(self.norm(hidden))
        return logits.cpu()


def compare(rank: int, size: int, *, library: Path, store: Path, backend: str, hooks: list[str]) -> dict[str, object]:
    """Train on the host and on two devices, and return the parameters of both for each hook; "" is DDP's own way."""
    load(library)
    dist.init_process_group(f"cpu:{backend},twin:{backend}", init_method=f"file://{store}", rank=rank, world_size=size)
    found = {
        hook: [train(rank, hook, *devices) for devices in (("cpu", "cpu"), ("twin:0", "twin:1"))] for hook in hooks
    }
    dist.destroy_process_group()
    return dict(found)


def train(rank: int, hook: str, first: str, second: str) -> list[float]:
    """Train four steps on two devices with a hook, by the default group, and return the parameters."""
    from fedring.ddp.hooks.by_name import hook_by_name

    model = Spanning(first, second)
    ddp = DistributedDataParallel(model)
    state = None
    if hook:
        state, function = hook_by_name(hook, model.named_parameters())
        ddp.register_comm_hook(state, function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        inputs, labels = torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(ddp(inputs), labels).backward()  # type: ignore[no-untyped-call]  # torch's
        if state is not None:
            state.end_step()
        optimizer.step()
    numbers: list[float] = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()]).tolist()
    return numbers
