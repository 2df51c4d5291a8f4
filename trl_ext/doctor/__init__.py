"""Why nothing is learned: checks of a trainer's data, model and configuration, and of its first steps."""

from trl_ext.doctor import data, labels, sampled, setup, steps, text  # noqa: F401  their checks enter the table
from trl_ext.doctor.examine import DoctorCallback, examine
from trl_ext.doctor.report import Finding, Report
from trl_ext.doctor.table import CHECKS

__all__ = ["CHECKS", "DoctorCallback", "Finding", "Report", "examine"]
