"""Hostile worlds: small deployments of production code under many random faults, generated from a seed.

Tokens are computed by the production runner with the null model, whose KV is a running hash read through block tables:
a stale, lost or foreign block yields a wrong token.
"""
