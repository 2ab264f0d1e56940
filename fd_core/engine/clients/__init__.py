"""What a server holds of an engine, wherever it runs."""
