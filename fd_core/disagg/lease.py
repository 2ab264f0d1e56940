"""When a lease begins, goes on and ends; pure."""
