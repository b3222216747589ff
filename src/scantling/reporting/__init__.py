"""What a run was: read from its folder, compared with others, shown on one page."""
