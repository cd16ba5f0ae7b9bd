"""Paired tuning of kernel launch configurations: evidence first, or the incumbent stays."""
