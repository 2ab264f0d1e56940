"""The running batch: its plan, its slots, its tokens and what a step yields."""
