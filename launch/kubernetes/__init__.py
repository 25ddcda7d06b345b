"""`baton emit kubernetes`: the plan of a topology as Kubernetes objects."""
