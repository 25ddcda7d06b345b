"""Sizes of the pools that follow the load: the law, what it reads, and what acts on it."""
