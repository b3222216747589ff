"""Grids of recipes: what a sweep says, how it is run, and the table of its runs."""
