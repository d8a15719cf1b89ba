"""Devices and ranks that are not there: what is counted on them needs no GPU. Tests use them too."""
