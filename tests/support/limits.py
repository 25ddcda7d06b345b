"""How tests hold limits on a machine that is busy with other things."""

LOAD_FACTOR = 4.0
"""What a limit of the product may be exceeded by in a test: the test shares its processors with others, and a process
that is ready to run may have to wait for its turn that long. Without load each limit holds as it is."""

HANG_S = 30.0
"""After this a test gives up on what should happen at once; it says nothing about speed."""
