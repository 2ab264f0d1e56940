"""The page at `/` of the router: workers, roles and totals as they are now."""
