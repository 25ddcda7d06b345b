"""What Baton's tiers share: the pure core, the engine, the KV transfer and the wire."""
