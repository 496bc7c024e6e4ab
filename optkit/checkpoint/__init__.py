"""Hollow: import the module you need."""
