"""Kits for policies of the scheduler and the cluster: derive a class from a suite and name the policy."""
