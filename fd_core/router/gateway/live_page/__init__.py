"""The page at `/` of the router: current workers, roles and totals."""
