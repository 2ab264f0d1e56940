"""Processes that make and compile the grammars of requests, so that work which takes too long can be killed.

    server --Task--> CompilePool --socket--> one of a few processes --ConstraintOutcome--> server

The engine compiles the same text again, which is known to compile within the limits.
"""
