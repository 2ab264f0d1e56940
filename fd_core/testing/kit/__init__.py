"""Parts shared by all kits: target, requirements, limits and judging."""
