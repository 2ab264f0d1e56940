"""The decode worker's side of transfers: its leases, its connections to prefill workers, and the port to its engine."""
