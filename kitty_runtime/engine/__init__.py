"""Continuous batching on 2-bit pages: requests join and leave at every step."""
