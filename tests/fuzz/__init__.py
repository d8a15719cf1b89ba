"""Random programs over an optimizer, beside a slow, plain model of FusedAdam that shares no code with it."""
