"""Audits of an output: integrity from the files alone, values against a reference."""

from hs_ray.verify.argmax import verify_argmax
from hs_ray.verify.integrity import verify_integrity
from hs_ray.verify.reference import verify_reference
from hs_ray.verify.report import Problem, ReferenceReport, Report

__all__ = ["Problem", "ReferenceReport", "Report", "verify_argmax", "verify_integrity", "verify_reference"]
