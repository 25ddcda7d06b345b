"""One end of an edge as a process, with commands on stdin and one JSON reply per line:

    python -m tests.transfer.peer SIDE HOST PORT

edge PREFIX GENERATION: make and connect; send BYTES SEED [ENDS]; recv BYTES [ENDS]: replies with the checksum of the
received bytes. ENDS are those of the sections. store: replies with the port of a new store; map HANDLE: with the sum
of an exported buffer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec
from baton.transfer.gloo import GlooEdge
from baton.transfer.rendezvous import EdgeStore
from baton.transfer.sections import checksum
from baton.transfer.shared_buffers import map_exported


def payload(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if seed == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def main() -> None:
    side, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    edge: Any = None
    stores: list[EdgeStore] = []
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["op"] == "edge":
                edge = GlooEdge(EdgeSpec(host, port, command["prefix"], command["generation"], side))  # type: ignore
                edge.connect()
                reply: dict[str, Any] = {}
            elif command["op"] == "send":
                edge.send(payload(command["bytes"], command["seed"]), 20.0, command.get("ends", ()))
                reply = {}
            elif command["op"] == "store":
                stores.append(EdgeStore())
                reply = {"port": stores[-1].port}
            elif command["op"] == "map":
                buf = map_exported(bytes.fromhex(command["handle"]), torch.device("cpu"))
                reply = {"sum": int(buf.long().sum())}
            else:
                buf = torch.empty(command["bytes"], dtype=torch.uint8)
                edge.recv(buf, 20.0, ends=command.get("ends", ()))
                reply = {"checksum": checksum(b"", buf)}
        except HandoffError as e:
            reply = {"error": e.message}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
