import numpy as np


def run(x):
    return np.ascontiguousarray(np.swapaxes(x, 0, 1))
