import numpy as np


def run(x):
    """`[n]` -> `[n]`: x * Phi(x), Phi being the distribution function of the standard normal.

    The tail Phi(-a), a = |x|, comes from two forms that lose no accuracy: below 1.25 one half less the density times
    a + a^3/3 + a^5/15 + ... (all terms positive), above it the density over Laplace's continued fraction
    a + 1/(a + 2/(a + 3/(...))). Source: Abramowitz and Stegun, 26.2.11 and 26.2.14.
    """
    a = np.minimum(np.abs(x), 40.0)  # the tail is zero in float64 from 38.6 on
    density = np.exp(-0.5 * a * a) / np.sqrt(2.0 * np.pi)

    small = np.minimum(a, 1.25)
    term = small.copy()
    series = small.copy()
    for k in range(1, 30):
        term = term * small * small / (2 * k + 1)
        series = series + term

    large = np.maximum(a, 1.25)
    fraction = large.copy()
    for k in range(300, 0, -1):
        fraction = large + k / fraction

    tail = np.where(a < 1.25, 0.5 - density * series, density / fraction)
    return np.where(x > 0, x * (1.0 - tail), x * tail)
