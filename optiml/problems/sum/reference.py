import numpy as np


def run(x):
    """`[n]` -> `[1]`: the sum of all elements; 0 of none."""
    return np.sum(x).reshape(1)
