"""HTTP that server and router share, whatever library reads it: access, connections, bodies, errors, drain, pages."""
