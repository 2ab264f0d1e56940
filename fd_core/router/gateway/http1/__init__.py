"""HTTP/1.1 of the gateway on httptools: connections of clients, and connections to workers."""
