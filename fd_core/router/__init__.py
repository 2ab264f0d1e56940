"""The router: chooses the worker for each request, and counts the load of the workers.

`router.Router` is the gateway's interface. It is pure: no I/O, no clock, no randomness; clock readings and random
numbers are passed in. `workers` holds the registry and the health of workers, `selection` their loads; `policies`
choose; `prefix_index` stores the prefixes that workers served, compute or report to hold; `placement` combines these
for one request.
"""
