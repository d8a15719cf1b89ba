"""State dicts: out in bounded memory, and in, checked before anything is written."""
