"""Simulated clients and their conversations."""
