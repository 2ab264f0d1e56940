"""Launchers: they start, place, pin and supervise ranks, workers and routers on the nodes that they manage."""
