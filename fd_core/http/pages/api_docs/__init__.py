"""The page at `/docs`: routes, parameters and schemas of the OpenAPI document that the same server publishes."""
