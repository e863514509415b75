"""Trainer to engines: one channel per way the bytes travel."""

from penstock.weights.in_process import InProcessChannel

__all__ = ["InProcessChannel"]
