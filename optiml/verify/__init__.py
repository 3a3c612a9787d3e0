"""Whether a kernel is right: references, tolerances, hidden cases, controls, verdicts."""
