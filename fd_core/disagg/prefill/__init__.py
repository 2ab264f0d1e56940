"""The prefill worker's side of transfers: its leases, the socket that it listens on, and the port to its engine."""
