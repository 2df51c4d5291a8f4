"""Offline and online RLHF."""
