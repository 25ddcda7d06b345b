"""What Baton's tiers share: the pure core, the engine, the KV transfer and the wire."""

import os

# gRPC's core writes lines of level INFO about peers that end, which Baton's own logs report with role and address.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
