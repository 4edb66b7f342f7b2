"""A file of requests in, a file of answers out: what `kitty batch` does. No torch here."""
