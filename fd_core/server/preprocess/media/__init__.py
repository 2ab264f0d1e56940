"""Images of requests: fetched, decoded and processed within limits, without delaying other requests."""
