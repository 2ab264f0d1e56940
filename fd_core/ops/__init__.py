"""The Ops contract and its framework packs: numpy, torch and the native kernels.

`contract` is what models are written over; each pack implements it on one framework's own arrays.
"""
