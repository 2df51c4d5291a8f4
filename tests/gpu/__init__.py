"""Tests that need a GPU; without one they are collected and skipped. `make test-gpu` runs them."""
