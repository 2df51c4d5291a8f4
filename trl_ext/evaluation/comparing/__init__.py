"""Comparisons of runs and models: generations, preference pairs, reward models, best of n, several seeds."""
