"""The processes of a run: their context, exchanges of small objects, failures of peers, and shared folders."""
