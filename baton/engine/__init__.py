"""The model on torch: loading, paged KV, attention, sampling, one runner for both pools."""
