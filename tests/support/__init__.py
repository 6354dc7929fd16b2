"""Helpers shared by the tests: model files and golden numbers."""
