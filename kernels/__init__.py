"""Triton kernels with a torch reference each."""
