"""Gradient synchronisation for data-parallel PyTorch training."""
