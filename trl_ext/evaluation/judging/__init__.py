"""Judging pairs of responses: judges and the cache of verdicts."""
