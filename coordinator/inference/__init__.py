"""The Open Inference Protocol, version 2, and Triton's generate extension: what they say of a text model. No I/O."""
