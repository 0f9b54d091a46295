"""Kernels, one operation a file. `reference` holds the same operations in plain torch."""
