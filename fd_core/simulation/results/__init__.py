"""What came of a run: the outcome of each request, how workers were used, and what to read from both."""
