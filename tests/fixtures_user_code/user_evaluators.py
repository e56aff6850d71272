"""Evaluators with the usual mistakes, and data without test samples."""

import sys
from pathlib import Path
from typing import Any

from torch import nn

from fedring.data import Split
from fedring.data import digits as all_digits
from fedring.offers import offers


@offers("evaluator")
def raises(model: nn.Module, samples: Any) -> Any:
    """An evaluator that looks for a column that is not there."""
    raise KeyError("no such column")


@offers("evaluator")
def half(model: nn.Module, samples: Any) -> Any:
    """An evaluator that returns a number alone."""
    return 0.5


@offers("evaluator")
def lossless(model: nn.Module, samples: Any) -> Any:
    """An evaluator that returns no loss."""
    return {"f1": 0.5}


@offers("evaluator")
def undefined(model: nn.Module, samples: Any) -> Any:
    """An evaluator whose loss is no number."""
    return {"loss": float("nan"), "accuracy": 0.5}


@offers("evaluator")
def misnamed(model: nn.Module, samples: Any) -> Any:
    """An evaluator with a good figure, and two that cannot be sent."""
    return {"loss": 0.5, "F1 score (%)": 81.0, "f1": 0.81, "auc": float("nan")}


@offers("evaluator")
def exits(model: nn.Module, samples: Any) -> Any:
    """An evaluator that ends the process, as argparse does."""
    sys.exit(0)


@offers("data")
def untested(root: Path | None, download: bool) -> Split:
    """The digits without test samples."""
    split = all_digits(root, download)
    return Split(split.train, [], split.classes)  # type: ignore[arg-type]  # a list of none is a data set
