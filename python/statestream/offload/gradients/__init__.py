"""Gradients that backward offloads."""
