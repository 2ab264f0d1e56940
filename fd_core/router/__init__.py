"""The router: which worker serves a request, and the load that is counted meanwhile.

`router.Router` is what the gateway uses. It is pure: no I/O, no clock, no randomness; readings of the clock and random
numbers are passed in. `workers` holds the registry and the health of workers, `selection` their loads; `policies`
choose; `prefix_index` knows which prefixes workers served or compute, `reported` which they report to hold;
`placement` brings these together for one request.
"""
