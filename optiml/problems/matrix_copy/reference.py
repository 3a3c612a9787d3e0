import numpy as np


def run(x):
    """`[R, C]` -> `[R, C]`: the same elements."""
    return np.array(x)
