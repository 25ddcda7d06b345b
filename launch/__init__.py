"""The `baton` command, the local cluster, launch scripts and the benchmark."""
