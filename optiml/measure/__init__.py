"""What a kernel costs and why: counted metrics, the time model, bottlenecks, comparisons."""
