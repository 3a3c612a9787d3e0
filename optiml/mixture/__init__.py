"""OptiML-G: several frozen code models write one kernel together, sharing hidden states as they go.

Needs the extra `mixture` (torch, transformers). `local` is the door for everybody else: it imports none of that.
"""
