"""Submissions: rows and files, embedded and course assets, and grades."""
