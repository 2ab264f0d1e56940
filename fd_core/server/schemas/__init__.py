"""What clients send and get, as structs."""
