"""Tensor ops for GPUs in Triton: one file for each op, and the executor that calls them."""
