"""Search for the cheapest deployment that meets an SLO: the next plans to simulate, and the evidence of the answer."""
