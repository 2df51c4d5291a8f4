"""Submissions: their rows and files, the embedded and the course's assets, and grades."""
