"""Authentication, rate limits and the access log; the same for a server and for a router.

`keys` reads and recognises keys and counts their usage, `control` rejects requests, and `record` is
the record of one request, with its line in the log.
"""
