"""Where processes run: launchers start, place, pin and supervise ranks, workers and routers on the nodes they know."""
