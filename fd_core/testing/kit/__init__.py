"""What every kit shares: its target, its requirements, its limits and how it judges."""
