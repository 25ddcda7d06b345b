"""Moving KV between a prefill rank and a decode rank over 2-rank process groups."""
