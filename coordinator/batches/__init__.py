"""Files and batches of requests, kept on disk."""
