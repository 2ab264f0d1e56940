"""Paddle operations."""
