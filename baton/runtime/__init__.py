"""The wire: the codec between core and protobuf, the error table, worker sessions."""
