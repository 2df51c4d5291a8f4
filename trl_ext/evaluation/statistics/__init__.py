"""Intervals, tests and rates for evaluations."""
