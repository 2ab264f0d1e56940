"""A whole deployment from one file: routers and workers, restarted when they die, scaled by load.

`controller` decides and is pure, `scaling` computes the number of workers for a load, `deployment` executes. Requests
and tokens travel between routers and workers only, never through this package.
"""
