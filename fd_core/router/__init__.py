"""The router: which worker serves a request, and the load that is counted meanwhile.

`router.Router` is the gateway's interface. It is pure: no I/O, no clock, no randomness; clock readings and random
numbers are passed in. `workers` holds the registry and the health of workers, `selection` their loads; `policies`
choose; `prefix_index` stores the prefixes that workers served or compute, `reported` those that they report to hold;
`placement` brings these together for one request.
"""
