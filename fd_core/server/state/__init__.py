"""What a server holds as long as it runs."""
