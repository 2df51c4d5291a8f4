"""Embedded word problems of one and two steps with worked answers, to fine-tune a small pretrained model on."""

from pathlib import Path

DATA_DIR = Path(__file__).parent / "data"

__all__ = ["DATA_DIR"]
