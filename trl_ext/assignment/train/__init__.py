"""Train on the functions of an assignment."""
