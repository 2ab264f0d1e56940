"""Results of a run: the outcome of each request, the use of workers, and the figures computed from both."""
