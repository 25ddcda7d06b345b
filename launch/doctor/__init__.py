"""`baton doctor`: tries what a cluster will need, on every node, before it is started."""
