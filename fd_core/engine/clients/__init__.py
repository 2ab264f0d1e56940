"""Clients, through which a server uses engines wherever they run."""
