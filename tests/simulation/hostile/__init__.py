"""Hostile worlds: small deployments of production code, made from a seed, in which much goes wrong.

Tokens are computed by the production runner with the null model, whose KV is a running hash that is read through block
tables: a stale, lost or foreign block is a wrong token.
"""
