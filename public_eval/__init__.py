"""The public evaluation as commands: generate, score, judge, grade, pack and tournament.

Run them from the repository's root, such as `python -m public_eval.grade submission/`.
"""
