"""A whole cluster in virtual time, from one seed: the product's policy, schedulers and hand-over machines on simulated
processes, clocks, streams and KV. See docs/simulator.md."""
