"""A rank of tests/support/rank_pool.py, whose pipe is its standard input."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

from tests.support.rank_pool import rank_process

if __name__ == "__main__":
    pipe = Connection(os.dup(0))
    multiprocessing.current_process().authkey = pipe.recv_bytes()  # each fetches the other's tensors with it
    rank_process(pipe)
