"""Reasoning with verified rewards."""
