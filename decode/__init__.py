"""The decode tier: continuous batching over received KV."""
