"""The functions that an assignment can ask for, with their test cases and known wrong answers."""
