"""Path of a request through the router, to a worker and back."""
