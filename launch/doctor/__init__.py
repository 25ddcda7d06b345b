"""`baton doctor`: checks, on every node, what a cluster needs before it is started."""
