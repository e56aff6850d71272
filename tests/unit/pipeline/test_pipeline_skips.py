"""An encoder and decoder in stages, whose tensors skip stages, trains as in one process, with every schedule."""

from collections.abc import Mapping

import pytest
import torch
from tests.translators import COUNT, NAMES, STEPS, Translator, alone, model_of, sentences, stages_of
from torch import Tensor, nn

from fedring.pipeline.cut import as_cut, cut_at, cut_by_counts
from fedring.pipeline.layers import Layers, Stages
from fedring.pipeline.worker import LocalPipeline
from fedring.schedules.routes import BATCH, Routes
from fedring.schedules.schedule import Schedule, make, pipedream


def train(cut: Stages, schedule: Schedule, *, recompute: bool = False) -> list[float]:
    pipeline = LocalPipeline(stages_of(cut, schedule, recompute=recompute), schedule, routes=cut.routes)
    return [loss for step in range(STEPS) for loss in pipeline.run(*sentences(step)).losses]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_a_mask_that_skips_a_stage_gives_the_losses_of_one_process(name: str, recompute: bool) -> None:
    model = model_of()
    interleaved = name == "interleaved_1f1b"
    cut = cut_at(model, ["encoder.1", "decoder.0", "decoder.1"] if interleaved else NAMES)
    schedule = make(name, len(cut), COUNT, workers=2 if interleaved else 0)
    assert train(cut, schedule, recompute=recompute) == pytest.approx(alone(model_of()), abs=1e-5)


def test_pipedream_updates_with_gradients_of_the_weights_that_the_skipping_tensors_were_made_with() -> None:
    """With an interval of the whole run, pipedream is 1F1B; with an interval of 1, gradients are late."""
    losses = train(cut_at(model_of(), NAMES), pipedream(3, COUNT, interval=COUNT))
    assert losses == pytest.approx(alone(model_of()), abs=1e-5)
    late = train(cut_at(model_of(), NAMES), pipedream(3, COUNT))
    assert len(late) == STEPS * COUNT
    assert late[-1] < late[0]


def test_recomputation_repeats_the_dropout_of_all_layers() -> None:
    losses = []
    for recompute in (False, True):
        cut, schedule = cut_at(model_of(dropout=0.4), NAMES), make("1f1b", 3, COUNT)
        torch.manual_seed(3)
        losses.append(train(cut, schedule, recompute=recompute))
    assert losses[0] == losses[1]
    assert losses[0] != pytest.approx(alone(model_of()), abs=1e-2)  # dropout has an effect


def test_evaluation_passes_tensors_by_the_same_routes() -> None:
    model = model_of(dropout=0.4)
    cut, schedule = cut_at(model, NAMES), make("1f1b", 3, COUNT)
    pipeline = LocalPipeline(stages_of(cut, schedule), schedule, routes=cut.routes)
    inputs, _ = sentences(0)
    outputs = pipeline.evaluate(inputs)
    expected = model.eval()(*(torch.cat(list(parts)) for parts in inputs.values()))
    torch.testing.assert_close(torch.cat(outputs), expected)


class Encode(nn.Module):
    """The first stage of torch's own transformer, which cannot be traced."""

    def __init__(self, model: "Translator") -> None:
        super().__init__()
        self.source, self.encoder = model.source, model.transformer.encoder

    def forward(self, source: Tensor) -> dict[str, Tensor]:
        """Return the memory, and the mask of the padding."""
        padding = source == 0
        return {"memory": self.encoder(self.source(source), src_key_padding_mask=padding), "padding": padding}


class Begin(nn.Module):
    """The second stage: the decoder's first layer."""

    def __init__(self, model: "Translator") -> None:
        super().__init__()
        self.target, self.layer = model.target, model.transformer.decoder.layers[0]

    def forward(self, target: Tensor, memory: Tensor, padding: Tensor) -> dict[str, Tensor]:
        """Return the hidden state."""
        return {"hidden": self.layer(self.target(target), memory, memory_key_padding_mask=padding)}


class End(nn.Module):
    """The last stage: the rest of the decoder."""

    def __init__(self, model: "Translator") -> None:
        super().__init__()
        decoder = model.transformer.decoder
        self.layer, self.norm, self.head = decoder.layers[1], decoder.norm, model.head

    def forward(self, hidden: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return logits [batch, length, 9]."""
        last = self.layer(hidden, memory, memory_key_padding_mask=padding)
        logits: Tensor = self.head(last if self.norm is None else self.norm(last))
        return logits


def thirds(model: Translator) -> tuple[list[nn.Module], Routes]:
    """Cut the translator by hand, as docs/pipeline-reference.md says."""
    sources: tuple[Mapping[str, int], ...] = (
        {"source": BATCH},
        {"target": BATCH, "memory": 0, "padding": 0},
        {"hidden": 1, "memory": 0, "padding": 0},
    )
    return [Encode(model), Begin(model), End(model)], Routes(sources)


def test_torch_s_own_transformer_trains_in_stages_that_a_user_cuts() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Translator())
    losses = train(as_cut(thirds(models[0])), make("1f1b", 3, COUNT))
    assert losses == pytest.approx(alone(models[1]), abs=1e-5)


def test_torch_s_own_transformer_is_one_layer_of_a_trace() -> None:
    model = Translator()
    assert Layers(model, stages=9).names == ["inputs", "source", "target", "transformer", "head"]
    assert len(cut_by_counts(model, [3, 1, 1])) == 3
