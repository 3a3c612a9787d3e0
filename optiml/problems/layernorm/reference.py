import numpy as np


def run(x, weight, bias):
    """`[R, C]`, `[C]`, `[C]` -> `[R, C]`: rows with mean 0 and (biased) variance 1, then scaled and shifted.

    Differences from the first element of a row come first: they are exact where a row sits far from zero, so that the
    mean is too, and a float64 kernel is not measured against a reference less accurate than itself.
    """
    centred = x - x[:, :1]
    centred = centred - np.mean(centred, axis=1, keepdims=True)
    variance = np.mean(centred * centred, axis=1, keepdims=True)
    return centred / np.sqrt(variance + 1e-5) * weight + bias
