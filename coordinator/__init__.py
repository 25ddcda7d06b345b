"""The front: admission, routing, journal, text, HTTP and gRPC."""
