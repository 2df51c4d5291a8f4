"""Distillation on the policy's own samples from a teacher."""
