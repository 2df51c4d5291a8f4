"""Its place tells pytest where the package is."""
