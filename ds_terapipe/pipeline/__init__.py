"""Execution of a token-slice schedule inside DeepSpeed's pipeline engine."""

from __future__ import annotations
