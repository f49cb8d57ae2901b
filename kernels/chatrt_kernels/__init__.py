"""Tensor operations on paged KV caches. Knows tensors and page ids; no sessions, no models."""
