"""Measurements, not tests: each prints its figures and asserts no time."""
