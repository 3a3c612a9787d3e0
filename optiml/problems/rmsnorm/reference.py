import numpy as np


def run(x, weight):
    """`[R, C]`, `[C]` -> `[R, C]`: rows with a mean square of 1, then scaled."""
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * weight
