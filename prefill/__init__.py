"""The prefill tier: computes prompts and ships their KV."""
