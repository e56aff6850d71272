"""Samples whose inputs are several tensors by name: they are the arguments of the model's forward."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from fedring.train.batches import Inputs, by_name, fetch
from fedring.train.errors import TrainError
from fedring.train.evaluation import evaluate
from fedring.train.loop import train
from fedring.train.plan import Plan
from fedring.train.tally import Tally

CPU = torch.device("cpu")


class Pairs(Dataset[tuple[dict[str, Tensor], int]]):
    """Points, of which a flag says whether the sign of their sum counts or its opposite."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(count, 3, generator=generator)
        self.flags = torch.randint(2, (count,), generator=generator).bool()
        self.labels = ((self.points.sum(1) > 0) ^ self.flags).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        return {"points": self.points[index], "flag": self.flags[index]}, int(self.labels[index])


class BatchedPairs(Pairs):
    """The same samples, in whole batches."""

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the samples at `indices` [batch] int64."""
        return {"points": self.points[indices], "flag": self.flags[indices]}, self.labels[indices]


class Flagged(nn.Module):
    """Scores points [batch, 3] with flags [batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, flag: Tensor, points: Tensor) -> Tensor:
        """Return logits [batch, 2]; the arguments are in another order than in the samples."""
        logits: Tensor = self.linear(points)
        return torch.where(flag[:, None], logits.flip(1), logits)


@pytest.mark.parametrize("samples", [Pairs(200), BatchedPairs(200)], ids=["one by one", "in batches"])
def test_a_model_of_several_tensors_is_trained_and_evaluated(samples: Pairs) -> None:
    torch.manual_seed(0)
    model = Flagged()
    plan = Plan(epochs=5, batch_size=20, lr=0.5, momentum=0.9, mu=0.0, seed=3, subset_size=0)
    train(
        model, samples, plan, loss=cross_entropy, optimizer_factory=lambda p, lr, m: torch.optim.SGD(p, lr), device=CPU
    )
    counts = evaluate(model, samples, loss=cross_entropy, device=CPU)
    assert counts.accuracy is not None
    assert counts.accuracy > 0.95


def test_both_kinds_of_samples_give_the_same_batches() -> None:
    cuts = [torch.tensor([4, 2]), torch.tensor([1, 0, 3])]
    batches: list[Sequence[tuple[Inputs, Tensor]]] = [list(fetch(kind(8), cuts, CPU)) for kind in (Pairs, BatchedPairs)]
    torch.testing.assert_close(batches[0], batches[1])


@pytest.mark.parametrize("inputs", [[1.0, 2.0], {"points": ["text"]}, ("a", "b")])
def test_inputs_of_other_kinds_are_refused(inputs: object) -> None:
    class Odd(Dataset[tuple[object, int]]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[object, int]:
            return inputs, 0

    with pytest.raises(TrainError, match="must be a tensor, a number, or a dict of them") as caught:
        list(fetch(Odd(), [torch.arange(2)], CPU))
    assert caught.value.reason == "bad_batch"


@pytest.mark.parametrize("masked", [0, 1])
def test_an_input_that_only_some_samples_have_is_refused(masked: int) -> None:
    class Uneven(Dataset[tuple[dict[str, Tensor], int]]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
            mask = {"mask": torch.ones(3)} if index == masked else {}
            return {"points": torch.ones(3), **mask}, 0

    with pytest.raises(TrainError, match="The samples of a batch have different inputs, such as ") as caught:
        list(fetch(Uneven(), [torch.arange(2)], CPU))
    assert caught.value.reason == "bad_batch"


def test_the_tensors_of_several_batches_are_found_by_name() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    assert by_name([one, two], ["inputs"]) == {"inputs": [one, two]}
    assert by_name([{"values": one}, {"values": two}], ["inputs"]) == {"inputs": [one, two]}  # there is no other
    assert by_name([{"left": one, "right": two}], ["right"]) == {"right": [two]}
    assert by_name([{"left": one, "right": two}], []) == {}
    with pytest.raises(TrainError, match=r"The model takes 'mask', but the samples have left, right\.") as caught:
        by_name([{"left": one, "right": two}], ["mask"])
    assert caught.value.reason == "bad_batch"


def test_a_sample_of_several_labels_counts_as_the_share_that_is_right() -> None:
    logits = nn.functional.one_hot(torch.tensor([[0, 1, 2], [2, 2, 2], [1, 1, 1]]), 3).float().transpose(1, 2)
    labels = torch.tensor([[0, 1, 1], [2, 2, -100], [-100, -100, -100]])  # two thirds, all, and nothing to count
    tally = Tally()
    tally.add(torch.tensor(1.0), logits, labels)
    assert (tally.correct, tally.total, tally.classified) == (round(2 / 3 + 1), 3, True)
    tally.add(torch.tensor(1.0), logits, labels)
    assert tally.correct == round(2 * (2 / 3 + 1))
    other = Tally()
    other.add(torch.tensor(1.0), torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.int64))  # of 4 places, 3 labels
    assert not other.classified
