"""Judging many pairs: LLM and reward-model judges, retries, the cache of verdicts, and what they cost."""
