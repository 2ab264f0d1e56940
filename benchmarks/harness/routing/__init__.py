"""Compare routers in front of the same simulated workers."""
