"""Speed of the engine: fixed shapes and request loads, kitty beside 16 bits in the same run."""
