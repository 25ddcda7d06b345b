"""The prefill worker: computes prompts and hands their KV over to decode workers."""
