"""Files and batches of requests: a process of its own, and a client of the coordinator's public API."""
