"""The production engine, router and stores under a virtual clock: device, network and time alone are made up.

    conversations --> clients --> routers --> workers { the engine's own loop } --> a device with made-up tokens
                         ^                                     |
                         +------------- outcomes <-------------+

`timeline` has the clock and what happens next; `costs` says how long a step, a copy or a transfer takes; `workloads`
make the conversations; `engines` run production's engine; `results` reads what came of a run.
"""
