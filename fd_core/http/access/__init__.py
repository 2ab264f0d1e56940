"""Who may ask, for how much, and what is written down about it; the same for a server and for a router.

`key_file` reads keys, `keys` recognises them and counts what each may take, `control` joins the two and answers for
what is refused, `record` is what is known of one request, and `access_log` writes its line.
"""
