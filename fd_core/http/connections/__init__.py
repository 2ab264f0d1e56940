"""Admission of connections, their number and their timeouts: checks of servers and routers before a request is read."""
