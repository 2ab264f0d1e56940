"""Planning of steps: slots, budget, policies and the scheduler. No I/O, no clock, no locks."""
