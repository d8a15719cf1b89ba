"""Faults planted in the sources, to see that the tests notice them; README.md has the results."""
