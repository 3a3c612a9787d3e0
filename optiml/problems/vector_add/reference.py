def run(a, b):
    """`[n]`, `[n]` -> `[n]`: the sum of each pair."""
    return a + b
