"""Helpers shared by the tests: data, models, searches and pages that several test modules use."""
