"""Axes that the kits vary, and cases in which every pair of their values occurs."""
