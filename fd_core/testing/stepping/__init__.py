"""Plans and steps for a runner without an engine."""
