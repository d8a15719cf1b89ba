"""Muon, in whole batches."""
