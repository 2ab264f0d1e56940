"""A request's way through the router, to a worker and back."""
