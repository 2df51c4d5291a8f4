"""Evolution strategies: updates from the rewards of perturbed policies, without gradients."""
