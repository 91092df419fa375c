"""Mechanical changes to the package, and which tests notice them."""
