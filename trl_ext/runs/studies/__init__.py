"""Recipes that train nothing themselves: sampling and evaluation of one model, and studies that run other recipes."""
