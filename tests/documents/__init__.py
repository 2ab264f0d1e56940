"""Every block of code in the documents is run as a reader would run it, or is marked with a reason."""
