"""The page at `/`: current state of the server, and a playground that sends requests to it."""
