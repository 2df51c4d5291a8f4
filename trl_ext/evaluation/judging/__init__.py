"""Judging pairs of responses: judges, the cache of verdicts, and costs."""
