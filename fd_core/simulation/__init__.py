"""The production engine, router and stores under a virtual clock: only the device, the network and time are simulated.

        conversations --> clients --> routers --> workers { the engine's own loop } --> a device with synthetic tokens
                         ^                                     |
                         +------------- outcomes <-------------+

`timeline` has the clock and the event queue; `costs` models how long a step, a copy or a transfer takes; `workloads`
generate the conversations; `engines` run the production engine; `results` evaluates the runs.
"""
