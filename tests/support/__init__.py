"""What several tests share: tiny models, runners of training in processes of their own, a judge's server, files."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
