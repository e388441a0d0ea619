"""Tools shared by the tests: worlds of processes, and training in them."""
