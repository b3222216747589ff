"""Number formats, used by everything above."""
