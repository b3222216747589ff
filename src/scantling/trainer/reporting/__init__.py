"""Reporting: read finished or running runs from their folders, compare them, and show them on one page."""
