"""Committed payload bytes: what a codec sends may not change unnoticed."""
