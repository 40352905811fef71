"""Step `verify`: the gate that proves, form by form, that what is served is what was trained."""

from components.verify.step import VerifyResult, verify

__all__ = ["VerifyResult", "verify"]
