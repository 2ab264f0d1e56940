"""Commands that serve: `serve`, `route`, `cluster` and `run-batch`."""
