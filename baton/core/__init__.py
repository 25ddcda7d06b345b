"""Pure values and decisions on the standard library: no clock, no I/O, no torch, no grpc."""
