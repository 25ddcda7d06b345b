"""Baton's own kernels; each is tested against a plain reference implementation."""
