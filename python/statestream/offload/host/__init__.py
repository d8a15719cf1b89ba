"""Host memory for state, and where each parameter's lies."""
