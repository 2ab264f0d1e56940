"""The Ops contract and its framework packs: numpy, torch and the native kernels.

Models are written over `contract`; each pack implements it on the arrays of one framework.
"""
