"""Why nothing is learned: checks of a trainer's data, model and configuration, and of its first steps."""

from trl_ext.doctor import setup, steps, text  # noqa: F401  their checks enter the table
from trl_ext.doctor.examine import CHECKS, DoctorCallback, Finding, Report, examine

__all__ = ["CHECKS", "DoctorCallback", "Finding", "Report", "examine"]
