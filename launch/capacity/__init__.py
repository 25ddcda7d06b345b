"""`baton calibrate`, `baton simulate` and `baton plan`: what a cluster costs, what another one would do."""
