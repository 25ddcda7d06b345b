"""A worker that may share its GPU with others over NCCL: `python -m tests.support.one_gpu_worker prefill|decode ...`.

NCCL refuses two ranks of one host on one GPU. With a host id of its own each rank counts as another host, and the bytes
go over loopback sockets: slow, but with the same code as between hosts.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    role = sys.argv.pop(1)
    os.environ.update(
        NCCL_HOSTID=f"{role}-{os.getpid()}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_IB_DISABLE="1",
        NCCL_CUMEM_HOST_ENABLE="0",
    )
    runpy.run_module(role, run_name="__main__", alter_sys=True)
