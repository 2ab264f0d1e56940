"""Who may ask, for how much, and what is written down about it; the same for a server and for a router.

`keys` reads keys, recognises them and counts what each may take, `control` answers for what is refused, and `record` is
what is known of one request, with its line in the log.
"""
