"""Many requests in one file: `fdcore run-batch`, and /v1/files with /v1/batches over the same parts.

`lines` reads requests and writes answers, `asgi` asks the application as a client would, `running` does it for a whole
file, `store` keeps files and batches on disk, and `routes` offers them.
"""
