"""Figures of the README and the documentation, written as SVG files.

    python -m scripts.figures     # or: make figures

Each module has a function `draw_figures` that returns the SVG text of each file in `docs/figures`. A test compares the
files with these texts, so a figure cannot go out of date.
"""
