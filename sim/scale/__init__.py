"""Scale mode: a trace on many workers, with the production policies and measured costs."""
