"""The operations in Paddle."""
