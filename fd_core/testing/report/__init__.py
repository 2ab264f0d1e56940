"""Report cards of backends: recorded by pytest, merged, and rendered as text, JSON or one HTML page."""
