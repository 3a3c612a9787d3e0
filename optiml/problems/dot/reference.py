import numpy as np


def run(a, b):
    """`[n]`, `[n]` -> `[1]`: the sum of the products of corresponding elements; 0 of none."""
    return np.sum(a * b).reshape(1)
