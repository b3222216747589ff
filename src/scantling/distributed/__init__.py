"""Processes of a run: their context, collectives of small objects, errors of peers, and shared folders."""
