"""Trainings with hooks; test_hooks_training.py runs them on real ranks and compares them."""

import copy
import hashlib
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from fedring.ddp import hooks
from fedring.ddp.local_sgd import LocalSGD, OuterOptimizer
from tests.system.hook_cases import BUCKETS, CASES, START, STEPS, Case, Net, Training, mean

POWER_OPTIONS: dict[str, dict[str, Any]] = {
    "rank 1": {},
    "rank 2": {"matrix_approximation_rank": 2},
    "rank 4": {"matrix_approximation_rank": 4, "min_compression_rate": 1},
    "cold": {"warm_start": False},
    "without feedback": {"use_error_feedback": False, "random_seed": 3},
    "in batches": {"batch_tensors_with_same_shape": True, "orthogonalization_epsilon": 1e-8},
}
RESUMED = [
    "powersgd",
    "powersgd cold",
    "batched powersgd",
    "fp16(powersgd)",
    "int8",
    "int8 ef21",
    "topk",
    "topk ef21",
    "dgc",
]
LOCAL_STEPS = 3


def beside_torch(rank: int, size: int, *, buckets: str) -> dict[str, dict[str, float]]:
    """Return how far a training with our PowerSGD ends from one with torch's, and from one without compression."""
    dense = _trained(Case(hooks.allreduce_hook), buckets)
    ends = {}
    for name, some in POWER_OPTIONS.items():
        if name == "cold" and buckets == "many":
            continue  # torch's hook raises KeyError: each bucket deletes the factors of all others
        options = {"start_powerSGD_iter": START} | some
        theirs = _trained(Case(torchs.powerSGD_hook, lambda _, o=options: torchs.PowerSGDState(None, **o)), buckets)  # type: ignore[misc]
        ours = _trained(Case(hooks.powerSGD_hook, lambda _, o=options: hooks.PowerSGDState(None, **o)), buckets)  # type: ignore[misc]
        ends[name] = {"apart": float((ours - theirs).abs().max()), "from dense": float((ours - dense).abs().max())}
    bf16 = _trained(CASES["bf16"], buckets)
    ends["bf16"] = {"apart": 0.0, "from dense": float((bf16 - dense).abs().max())}
    return ends


def resumed(rank: int, size: int) -> dict[str, dict[str, str]]:
    """Return digests of parameters after a training without a stop, and after one that resumed with other buckets."""
    results = {}
    for name in RESUMED:
        buckets = "one" if name == "batched powersgd" else "many"  # it approximates whole buckets
        straight, half = Training(CASES[name], BUCKETS[buckets]), STEPS // 2
        for number in range(half):
            straight.step(number)
        saved = io.BytesIO()
        torch.save({"model": straight.model.state_dict(), "hook": straight.state.state_dict()}, saved)
        resumed = Training(CASES[name], BUCKETS["one"])
        checkpoint = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        resumed.model.load_state_dict(checkpoint["model"])
        forgetful = Training(CASES[name], BUCKETS["one"])
        forgetful.model.load_state_dict(checkpoint["model"])
        for number in range(half, STEPS):
            straight.step(number)
        resumed.state.load_state_dict(checkpoint["hook"])
        for number in range(half, STEPS):
            resumed.step(number)
            forgetful.step(number)
        ends = {"straight": straight, "resumed": resumed, "forgetful": forgetful}
        results[name] = {end: digest(training.parameters()) for end, training in ends.items()}
    return results


def save_checkpoints(rank: int, size: int, *, folder: str) -> dict[str, Any]:
    """Save a checkpoint for each hook after half a training in many buckets; return this worker's residuals."""
    residuals = {}
    for name in RESUMED:
        training = Training(CASES[name], BUCKETS["many"])
        for number in range(STEPS // 2 + 1):
            training.step(number)
        checkpoint = {"model": training.model.state_dict(), "hook": training.state.state_dict()}
        torch.save(checkpoint, f"{folder}/{name} {rank}")
        residuals[name] = training.residual().tolist()
    return residuals


def resume_checkpoints(rank: int, size: int, *, folder: str) -> dict[str, Any]:
    """Load this worker's checkpoints and train one step in one bucket; return what the tests compare."""
    results = {}
    for name in RESUMED:
        training = Training(CASES[name], BUCKETS["one"])
        checkpoint = torch.load(f"{folder}/{name} {rank}", weights_only=True)
        training.model.load_state_dict(checkpoint["model"])
        training.state.load_state_dict(checkpoint["hook"])
        before = mean(training.residual())
        own = training.residual().tolist()
        shared = {key: digest(tensor) for key, tensor in training.state.shared().items()}
        training.step(STEPS)
        estimates = getattr(training.state, "feedback", "") == "ef21"
        wanted = mean(training.asked_to_send()) + (0 if estimates else before)
        kept = mean(training.residual())
        gap = training.result() - kept if estimates else training.result() + kept - wanted
        results[name] = {
            "residual": own,
            "shared": shared,
            "lost": float(gap.norm() / wanted.norm()),
            "digest": digest(training.parameters()),
        }
    return results


def copied_state(rank: int, size: int) -> dict[str, Any]:
    """Replace the state of a training by a deep copy; return the error before `bind`, and if it trains the same."""
    straight, other = Training(CASES["powersgd"], BUCKETS["many"]), Training(CASES["powersgd"], BUCKETS["many"])
    error = ""
    for number in range(STEPS):
        straight.step(number)
        other.step(number)
        if number == START:
            vars(other.state).update(vars(copy.deepcopy(other.state)))
            try:
                other.state.names.of(_first_bucket(other))
            except ValueError as refused:
                error = str(refused)
            other.state.bind(other.model.named_parameters())
    return {"error": error, "equal": torch.equal(straight.parameters(), other.parameters())}


def local_trainings(rank: int, size: int) -> dict[str, Any]:
    """Train with local steps: with plain means, with DiLoCo's optimizer, compressed, and resumed."""
    plain = _Local(lambda anchors: torch.optim.SGD(anchors, lr=1.0))
    apart, wanted = [], torch.empty(0)
    for number in range(2 * LOCAL_STEPS):
        if number % LOCAL_STEPS == LOCAL_STEPS - 1:
            plain.move(number)
            wanted = mean(plain.parameters())
            apart.append(not torch.equal(mean(plain.parameters()).float(), plain.parameters()))
            plain.local.step()
        else:
            plain.step(number)
    far = float((plain.parameters() - wanted).abs().max())
    outer, int8 = _Local(), _Local(compression=True)
    for number in range(4 * LOCAL_STEPS):
        if number == LOCAL_STEPS + 1:
            int8 = int8.resumed()
        outer.step(number)
        int8.step(number)
    straight = _Local(compression=True)
    for number in range(4 * LOCAL_STEPS):
        straight.step(number)
    return {
        "far from the mean": far,
        "apart before": apart,
        "digests": [digest(one.parameters()) for one in (plain, outer, int8)],
        "resumed": torch.equal(straight.parameters(), int8.parameters()),
        "compressed": float((outer.parameters() - int8.parameters()).norm() / outer.distance()),
    }


def digest(values: Tensor) -> str:
    """Return the digest of the bits of `values`."""
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _trained(case: Case, buckets: str) -> Tensor:
    training = Training(case, BUCKETS[buckets])
    for number in range(STEPS):
        training.step(number)
    return training.parameters()


def _first_bucket(training: Training) -> Any:
    """Return an object with the interface of a bucket that holds the model's first parameter."""

    class Bucket:
        def parameters(self) -> list[Tensor]:
            return [next(iter(training.model.parameters()))]

        def index(self) -> int:
            return 0

    return Bucket()


class _Local:
    """A model that is trained with local steps between exchanges."""

    def __init__(self, outer: OuterOptimizer | None = None, *, compression: bool = False) -> None:
        torch.manual_seed(dist.get_rank())  # the ranks' models differ until LocalSGD makes them equal
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        state = hooks.Int8State(None, chunk=64, named_parameters=self.model.named_parameters()) if compression else None
        options: dict[str, Any] = {"outer": outer} if outer else {}
        self.local = LocalSGD(None, self.model.named_parameters(), every=LOCAL_STEPS, compression=state, **options)
        self._start = self.parameters()

    def move(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        inputs, classes = torch.randn(8, 24, generator=generator), torch.randint(0, 12, (8,), generator=generator)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), classes).backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()

    def step(self, number: int) -> None:
        self.move(number)
        self.local.step()

    def resumed(self) -> "_Local":
        saved = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "local": self.local.state_dict()}, saved)
        checkpoint = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        other = _Local(compression=True)
        other.model.load_state_dict(checkpoint["model"])
        other.local.load_state_dict(checkpoint["local"])
        return other

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def distance(self) -> float:
        return float((self.parameters() - self._start).norm())
