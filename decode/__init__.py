"""The decode worker: continuous batching over received KV."""
