"""HTTP code shared by server and router, for any HTTP library: access, connections, bodies, errors, drain, pages."""
