"""The router: which worker serves a request, and what is counted while it does.

`router.Router` is what the gateway uses. It is pure: no I/O, no clock, no randomness; readings of the clock and random
numbers are passed in. `workers` knows who is there and who is healthy, `accounting` what each has been given,
`policies` and `affinity` choose, `prefix_index` remembers who served which prefix, `published` what workers tell that
they hold.
"""
