"""The page at `/`: what the server does now, and a playground that asks it."""
