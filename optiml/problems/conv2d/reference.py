import numpy as np


def run(x, w, stride, padding):
    edge = (padding, padding)
    padded = np.pad(x, ((0, 0), (0, 0), edge, edge))
    taps = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    y = np.tensordot(taps, w, axes=((1, 4, 5), (1, 2, 3)))
    return np.ascontiguousarray(np.moveaxis(y, 3, 1))
