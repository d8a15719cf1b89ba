"""One file a claim; `python -m benchmarks` runs all that this machine can."""
