"""Authentication, rate limits and the access log; the same for a server and for a router.

`keys` reads keys, recognises them and counts what each may take, `control` answers for what is refused, and `record` is
what is known of one request, with its line in the log.
"""
