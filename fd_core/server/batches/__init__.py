"""Many requests in one file: `fdcore run-batch`, and /v1/files with /v1/batches over the same parts.

`lines` reads requests and writes answers, `running` sends the requests of a file to the application as a client would,
`store` keeps files and batches on disk, and `routes` offers them.
"""
