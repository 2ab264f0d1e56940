"""Finds the cheapest deployment that holds an SLO: what to simulate next, and what the answer rests on."""
