"""Number formats and numeric helpers, used by all other packages."""
