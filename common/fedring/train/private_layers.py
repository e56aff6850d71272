"""The layers that DP-SGD cannot train.

They compute with several samples at once, or keep what they saw.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def unfit_layer(model: nn.Module) -> str:
    """Return a sentence about a layer that DP-SGD cannot train, or "".

    It names the layer of the model, and says what to use instead.

    Args:
        model: The model, which may be without values.
    """
    for path, layer in model.named_modules():
        if why := _unfit(layer):
            return f"the layer {path or 'model'} ({type(layer).__name__}) {why}"
    return ""


def _unfit(layer: nn.Module) -> str:
    """Return the reason why a layer does not fit, or "".

    The reason is the end of a sentence.
    """
    trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
    if isinstance(layer, _InstanceNorm):
        return "keeps statistics of the samples: set track_running_stats = False" if layer.track_running_stats else ""
    if isinstance(layer, _BatchNorm):
        return "computes with several samples at once, so that none of them is private: use GroupNorm"
    if isinstance(layer, nn.RNNBase) and trained:
        return f"has no gradients of single samples: use opacus.layers.DP{layer.mode.partition('_')[0]}"
    if isinstance(layer, nn.MultiheadAttention):
        return "has no gradients of single samples: use opacus.layers.DPMultiheadAttention"
    if isinstance(layer, nn.EmbeddingBag) and trained:
        return "has no gradients of single samples: use Embedding"
    if trained and any(True for _ in layer.buffers(recurse=False)):
        return "has parameters and buffers, which may keep what it saw: move its buffers into a layer of their own"
    return ""
