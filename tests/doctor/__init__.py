"""The doctor: every fault that is planted is named, and no run without a fault has an alarm."""
