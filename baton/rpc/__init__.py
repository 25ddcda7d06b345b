"""The wire: codec between core and protobuf, the error table, sessions of workers."""
