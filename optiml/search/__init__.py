"""Monte Carlo tree search over source edits: edits, proposals, tree, journal, judge."""
