"""Sweeps: grids of recipes, their schema, runner and result table."""
