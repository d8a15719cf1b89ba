"""FusedAdam."""
