import numpy as np


def run(x, window, stride, padding):
    edge = (padding, padding)
    padded = np.pad(x, ((0, 0), (0, 0), edge, edge, edge), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (window, window, window), axis=(2, 3, 4))
    return windows[:, :, ::stride, ::stride, ::stride].max(axis=(5, 6, 7))
