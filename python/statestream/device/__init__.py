"""Queues, events, copies and memory of a device: CUDA, and the host."""
