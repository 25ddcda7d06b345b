"""Kernels of our own, each beside the plain twin that it is tested against."""
