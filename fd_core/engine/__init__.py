"""The engine: its loop, its output side, its process boundary and the clients that speak to it."""
