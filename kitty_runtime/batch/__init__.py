"""A file of requests in, a file of answers out: what `kitty batch` does. Only model.py knows torch."""
