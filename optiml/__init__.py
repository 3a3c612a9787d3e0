"""OptiML: an intent or a CUDA kernel in, a verified faster kernel out, with the reasons."""

__version__ = "0.1.0"
