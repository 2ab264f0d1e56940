"""Who may come in, how many at a time, and for how long: what servers and routers do before a request is read."""
