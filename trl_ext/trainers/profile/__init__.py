"""Where the time of a training step goes: the spans of a step, and the work that a processor can do."""
