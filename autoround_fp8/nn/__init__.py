"""Modules and hooks without policy."""
