"""FusedAdam's state in host memory, stepped in ranges of elements."""
