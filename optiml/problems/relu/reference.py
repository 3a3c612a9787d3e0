import numpy as np


def run(x):
    """`[n]` -> `[n]`: each element, or 0 where it is negative."""
    return np.maximum(x, 0)
