"""SCAFFOLD's formulas, shared by the server and its clients.

They are those of Karimireddy et al. 2020, algorithm 1, option II. The server keeps a control variate c, and client i
its own c_i. Each local step follows the gradient minus c_i plus c. After K steps with the learning rate eta, which have
moved the model by delta_i, the client's control variate becomes

    c_i' = c_i - c - delta_i / (K eta)

which is the mean gradient along the client's way. So c_i' - c_i follows from c, delta_i, K and eta, which the server
knows: clients upload nothing but delta_i.

A client without a control variate begins with c_i = c, so that nothing corrects its first round. c stays the mean of
the c_i of all clients that have one, whenever a client joins.
"""

import numpy as np
from numpy.typing import NDArray

from fedring.train.plan import batches_in

Float32 = NDArray[np.float32]


def local_steps(samples: int, *, epochs: int, batch_size: int) -> int:
    """Return the number of steps of the built-in training loop.

    Args:
        samples: that are drawn for the round, at least 1.
        epochs: passes over them, at least 1.
        batch_size: samples in a step, at least 1.
    """
    return epochs * batches_in(samples, batch_size)


def next_own(own: Float32 | None, control: Float32, delta: NDArray[np.floating], *, steps: int, lr: float) -> Float32:
    """Return the client's control variate after a round, c_i', [n].

    Args:
        own: before the round, c_i, [n]; None = there was none, and c_i = c.
        control: the server's, c, [n].
        delta: the change of the parameters in the round, as it was sent, [n].
        steps: K, at least 1.
        lr: eta, the learning rate of the round, above 0.
    """
    moved = np.multiply(delta, -1.0 / (steps * lr), dtype=np.float64)
    if own is not None:
        moved += own
        moved -= control
    after: Float32 = moved.astype(np.float32)
    return after
