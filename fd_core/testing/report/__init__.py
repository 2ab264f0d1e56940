"""The report card of one or more backends: recorded by pytest, merged, and shown as text, JSON or one HTML page."""
