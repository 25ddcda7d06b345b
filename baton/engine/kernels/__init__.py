"""Faster kernels, each beside its plain twin."""
